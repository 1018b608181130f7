"""Settings of the cache side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvpool.v1 import common_pb2

from .groups.dense import DenseGroup
from .groups.group import Group, Sizes

MOST_BLOCKS = 1 << 16
"""Blocks of one sequence at most, where no pool bounds it: the manager's limit."""


@dataclass(frozen=True)
class CacheSettings:
    """Sizes of the pools, and timing and size of calls."""

    block_size: int = 16
    """Token slots of one block."""
    groups: tuple[Group, ...] = (DenseGroup(1024),)
    """The groups of layers, each with its pool."""
    max_chunk_tokens: int = 512
    """Most tokens of one sequence in one step, if a group bounds them."""
    retention_interval: int = 0
    """Tokens after which there is a boundary, again and again; 0: only where prompts may part."""
    report_seconds: float = 0.1
    """Filled blocks are reported at most this late, many in one call; sooner if another sequence waits for them."""
    reserve_seconds: float = 2.0
    """Seconds of decoding that the reserve should last without the manager."""
    prefix_wait_seconds: float = 10.0
    """How long a request waits for a prefix in flight that makes no progress, before it computes it itself."""
    no_blocks_retry_seconds: float = 1.0
    """Wait after NO_BLOCKS before the next Allocate if nothing is freed; only a safeguard."""
    max_items_per_call: int = 256
    """Sequences in one call to the manager."""
    max_call_bytes: int = 8 << 20
    """Bytes of tokens and table entries in one call, both directions; half of gRPC's message size."""

    def kv_cache_config(self, bytes_per_block: Sequence[int] | None = None) -> common_pb2.KVCacheConfig:
        """The groups and pools as a worker registers them. `bytes_per_block`: by group; None: they have no bytes."""
        config = common_pb2.KVCacheConfig(block_size=self.block_size)
        for index, (group, size) in enumerate(zip(self.groups, bytes_per_block or [0] * len(self.groups), strict=True)):
            group.introduce(config.groups.add(group=index, bytes_per_block=size), self.sizes)
            config.pools.add(group=index, tier=common_pb2.TIER_DEVICE, num_blocks=group.num_blocks)
        return config

    @cached_property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each group's pool, the null block included."""
        return tuple(group.num_blocks for group in self.groups)

    @cached_property
    def bounds_chunks(self) -> bool:
        """Whether no step may compute more than `max_chunk_tokens` of a sequence."""
        return any(group.bounds_chunks for group in self.groups)

    @cached_property
    def sizes(self) -> Sizes:
        """What the groups have in common."""
        return Sizes(self.block_size, self.grid_tokens // self.block_size or 1, self.max_chunk_tokens)

    @cached_property
    def grid_tokens(self) -> int:
        """Boundaries are multiples of so many tokens; 0: any block may end at one."""
        return max(group.grid_tokens for group in self.groups)

    @cached_property
    def growing(self) -> tuple[int, ...]:
        """The groups that keep everything of a sequence, and so take blocks of the reserve while it decodes."""
        return tuple(index for index, group in enumerate(self.groups) if group.table_type.grows)

    @cached_property
    def by_hits(self) -> tuple[int, ...]:
        """All groups, those that keep everything first: they have all that is cached, so that the others compare only what they
        keep."""
        return tuple(sorted(range(len(self.groups)), key=lambda index: index not in self.growing))

    @cached_property
    def keeping_boundaries(self) -> tuple[int, ...]:
        """The groups in which a prefix can be a hit only where it was named at a boundary."""
        return tuple(index for index, group in enumerate(self.groups) if group.table_type.keeps_boundaries)

    @cached_property
    def capacity(self) -> int:
        """Blocks of tokens that one sequence can have at most."""
        return min((most for group in self.groups if (most := group.most_blocks(self.sizes))), default=MOST_BLOCKS)

    @cached_property
    def encoder_capacity(self) -> int:
        """Blocks of the longest input of an encoder; 0: no group holds any."""
        return max(group.most_encoder_blocks() for group in self.groups)
