"""The groups of layers of the workers in the stories, small enough to show every block in the picture."""

from __future__ import annotations

from enum import Enum
from typing import Final

from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache.settings import CacheSettings

BLOCK_SIZE: Final = 4
CHUNK_TOKENS: Final = 8
"""Most tokens of a sequence that one step computes."""
WINDOW: Final = 8
"""Tokens that a layer with a window sees."""
GRID_TOKENS: Final = 8
"""Snapshots are taken after multiples of so many tokens."""


class Kind(Enum):
    """Kinds of groups, each with the label of its tables in the picture."""

    FULL = "Table"
    WINDOW = "Window"
    STATE = "State"

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included: two rows of the picture can be granted, or one."""
        return 17 if self is Kind.FULL else 9

    @property
    def title(self) -> str:
        """The layers of the group, in words."""
        return {
            Kind.FULL: "layers that see the whole text",
            Kind.WINDOW: f"layers that see the last {WINDOW} tokens",
            Kind.STATE: f"recurrent layers: one state, kept after multiples of {GRID_TOKENS} tokens",
        }[self]


Layout = tuple[Kind, ...]
ONE_GROUP: Final = (Kind.FULL,)
FULL_AND_WINDOW: Final = (Kind.FULL, Kind.WINDOW)
FULL_AND_STATE: Final = (Kind.FULL, Kind.STATE)


def cache_settings(layout: Layout) -> CacheSettings:
    """Return the settings of a worker's cache side with these groups."""
    return CacheSettings(
        block_size=BLOCK_SIZE,
        num_blocks=tuple(kind.num_blocks for kind in layout),
        windows=tuple(WINDOW if kind is Kind.WINDOW else 0 for kind in layout),
        state_grid=GRID_TOKENS if Kind.STATE in layout else 0,
        max_chunk_tokens=CHUNK_TOKENS,
    )


def register_request(worker_id: str, root: common_pb2.Root, layout: Layout) -> cache_pb2.RegisterRequest:
    """Return the call with which a worker with these groups begins a session."""
    config = common_pb2.KVCacheConfig(block_size=BLOCK_SIZE)
    for number, kind in enumerate(layout):
        group = config.groups.add(group=number)
        if kind is Kind.FULL:
            group.full_attention.SetInParent()
        elif kind is Kind.WINDOW:
            # The blocks that the tokens of a step see, and those that they fill: they may begin anywhere in a block.
            seen, filled = -(-(WINDOW - 1) // BLOCK_SIZE), -(-(CHUNK_TOKENS - 1) // BLOCK_SIZE) + 1
            group.sliding_window.window_tokens, group.sliding_window.ring_blocks = WINDOW, seen + filled
        else:
            # The running state, and a copy of it that may become a snapshot.
            group.state.grid_tokens, group.state.scratch_blocks = GRID_TOKENS, 2
        config.pools.add(group=number, tier=common_pb2.TIER_DEVICE, num_blocks=kind.num_blocks)
    return cache_pb2.RegisterRequest(
        worker_id=worker_id,
        incarnation=1,
        register_no=1,
        model_fingerprint=root.model_fingerprint,
        kv_cache_config=config,
    )
