"""The KV caches of which stories are told: small enough that every block has a place in the picture."""

from __future__ import annotations

from enum import Enum
from typing import Final

from kvpool.cache_service.core.messages import Group, Layout
from kvpool.cache_service.core.windows import span

BLOCK_SIZE: Final = 4
NUM_BLOCKS: Final = 17
"""16 blocks that can be granted, and the null block."""
CHUNK_TOKENS: Final = 8
"""Tokens of a sequence that one step computes at most."""
WINDOW: Final = 8
"""Tokens that a layer with a window sees."""
GRID_BLOCKS: Final = 2
"""In blocks of tokens: snapshots of a state are taken after its multiples."""

_NUM_SCARCE: Final = 9
"""8 blocks that can be granted: a row of the picture."""

ONE_GROUP: Final = Layout(BLOCK_SIZE, (Group(NUM_BLOCKS),))


def _with_window() -> Layout:
    group = Group(_NUM_SCARCE, window=WINDOW)
    # What the tokens of a step see, and what they fill: they may begin anywhere in a block.
    ring = span(group, BLOCK_SIZE) + -(-(CHUNK_TOKENS - 1) // BLOCK_SIZE) + 1
    return Layout(BLOCK_SIZE, (Group(NUM_BLOCKS), group._replace(scratch_blocks=ring)))


FULL_AND_WINDOW: Final = _with_window()
FULL_AND_STATE: Final = Layout(
    BLOCK_SIZE, (Group(NUM_BLOCKS), Group(_NUM_SCARCE, scratch_blocks=2, grid_blocks=GRID_BLOCKS))
)
"""Scratch of a sequence: its running state, and a copy of it that may become a snapshot."""


class Kind(Enum):
    """What a group keeps of a sequence, and what the picture calls that."""

    FULL = "Table"
    WINDOW = "Window"
    STATE = "State"


def kind_of(group: Group) -> Kind:
    """By what is said of the group."""
    return Kind.STATE if group.grid_blocks else Kind.WINDOW if group.window else Kind.FULL


def group_title(group: Group) -> str:
    """Which layers it is of."""
    match kind_of(group):
        case Kind.FULL:
            return "layers that see the whole text"
        case Kind.WINDOW:
            return f"layers that see the last {group.window} tokens"
        case Kind.STATE:
            return f"recurrent layers: one state, kept after multiples of {group.grid_blocks * BLOCK_SIZE} tokens"
