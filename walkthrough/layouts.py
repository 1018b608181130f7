"""The groups of layers of the workers in the stories, small enough to show every block in the picture."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Final

from kvpool.worker_service.cache.groups.dense import DenseGroup
from kvpool.worker_service.cache.groups.group import Group
from kvpool.worker_service.cache.groups.state import StateGroup
from kvpool.worker_service.cache.groups.window import WindowGroup
from kvpool.worker_service.cache.settings import CacheSettings

BLOCK_SIZE: Final = 4
CHUNK_TOKENS: Final = 8
"""Most tokens of a sequence that one step computes."""
WINDOW: Final = 8
"""Tokens that a layer with a window sees."""
GRID_TOKENS: Final = 8
"""Snapshots are taken after multiples of so many tokens."""


class Kind(Enum):
    """Kinds of groups: the label of its tables in the picture, how to make one, and its layers in words. Two rows of the picture
    can be granted, or one."""

    FULL = "Table", partial(DenseGroup, 17), "layers that see the whole text"
    WINDOW = "Window", partial(WindowGroup, 9, WINDOW), f"layers that see the last {WINDOW} tokens"
    STATE = (
        "State",
        partial(StateGroup, 9, GRID_TOKENS),
        f"recurrent layers: one state, kept after multiples of {GRID_TOKENS} tokens",
    )

    def __init__(self, label: str, make_group: Callable[[], Group], title: str) -> None:
        self.label = label
        self.make_group = make_group
        self.title = title


Layout = tuple[Kind, ...]
ONE_GROUP: Final = (Kind.FULL,)
FULL_AND_WINDOW: Final = (Kind.FULL, Kind.WINDOW)
FULL_AND_STATE: Final = (Kind.FULL, Kind.STATE)


def cache_settings(layout: Layout) -> CacheSettings:
    """Return the settings of a worker's cache side with these groups."""
    return CacheSettings(
        block_size=BLOCK_SIZE,
        groups=tuple(kind.make_group() for kind in layout),
        max_chunk_tokens=CHUNK_TOKENS,
    )
