"""A sequence's part of a step."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """A PackedPart."""

    token_ids: list[int]
    start: int
    block_tables: tuple[list[int], ...]
