"""The layouts of KV caches in the stories, small enough to show every block in the picture."""

from __future__ import annotations

from enum import Enum
from typing import Final

from kvpool.cache_service.core.groups.window import span
from kvpool.cache_service.core.messages import GroupSpec, Layout

BLOCK_SIZE: Final = 4
NUM_BLOCKS: Final = 17
"""Blocks of a pool: 16 that can be granted, and the null block."""
CHUNK_TOKENS: Final = 8
"""Most tokens of a sequence that one step computes."""
WINDOW: Final = 8
"""Tokens that a layer with a window sees."""
GRID_BLOCKS: Final = 2
"""Distance of snapshots in blocks of tokens: they are taken after its multiples."""

_NUM_SCARCE: Final = 9
"""Blocks of a small pool: 8 that can be granted, a row of the picture, and the null block."""

ONE_GROUP: Final = Layout(BLOCK_SIZE, (GroupSpec(NUM_BLOCKS),))


def _with_window() -> Layout:
    group = GroupSpec(_NUM_SCARCE, window=WINDOW)
    # Blocks that the tokens of a step see, and those that they fill: they may begin anywhere in a block.
    ring = span(group, BLOCK_SIZE) + -(-(CHUNK_TOKENS - 1) // BLOCK_SIZE) + 1
    return Layout(BLOCK_SIZE, (GroupSpec(NUM_BLOCKS), group._replace(scratch_blocks=ring)))


FULL_AND_WINDOW: Final = _with_window()
FULL_AND_STATE: Final = Layout(
    BLOCK_SIZE, (GroupSpec(NUM_BLOCKS), GroupSpec(_NUM_SCARCE, scratch_blocks=2, grid_blocks=GRID_BLOCKS))
)
"""Its second group has two scratch blocks: the running state, and a copy of it that may become a snapshot."""


class Kind(Enum):
    """Kinds of groups, each with the label of its tables in the picture."""

    FULL = "Table"
    WINDOW = "Window"
    STATE = "State"


def kind_of(group: GroupSpec) -> Kind:
    """Return the kind of a group."""
    return Kind.STATE if group.grid_blocks else Kind.WINDOW if group.window else Kind.FULL


def group_title(group: GroupSpec) -> str:
    """Describe the layers of a group."""
    match kind_of(group):
        case Kind.FULL:
            return "layers that see the whole text"
        case Kind.WINDOW:
            return f"layers that see the last {group.window} tokens"
        case Kind.STATE:
            return f"recurrent layers: one state, kept after multiples of {group.grid_blocks * BLOCK_SIZE} tokens"
