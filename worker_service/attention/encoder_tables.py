"""The block tables of encoders' outputs, to which the parts of a step attend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from ..step import SequencePart
from .block_tables import IntArray
from .layout import BlockGroup, PackingError


class EncoderTables(NamedTuple):
    """The blocks of the cross group for the parts of a step, in order. Parts may have the same ones."""

    tables: list[tuple[int, ...]]
    """Block ids, cut to those that cover num_tokens."""
    num_tokens: list[int]
    """Length of the encoder's input, at least 1."""

    @classmethod
    def of(cls, parts: Sequence[SequencePart], group: BlockGroup, block_size: int) -> Self:
        """Collect the tables of the parts. Raises PackingError if a part has no encoder's blocks, too few, one that the group has
        not, or an input of another length than its blocks hold; or if two inputs are to be written to one block."""
        tables: list[tuple[int, ...]] = []
        written: list[int] = []
        for index, part in enumerate(parts):
            encoder = part.encoder
            if encoder is None or encoder.num_tokens < 1:
                raise PackingError(f"part {index} has no input of the encoder, which this model needs")
            table = tuple(encoder.table[: -(-encoder.num_tokens // block_size)])
            if len(table) * block_size < encoder.num_tokens:
                raise PackingError(
                    f"part {index} has {len(table)} blocks for {encoder.num_tokens} tokens of the encoder"
                )
            if min(table) < 1 or max(table) >= group.num_blocks:
                raise PackingError(f"part {index} has a cross block outside 1 … {group.num_blocks - 1}: {table}")
            if len(encoder.token_ids) not in (0, encoder.num_tokens):
                raise PackingError(
                    f"part {index} has {len(encoder.token_ids)} tokens for the encoder, and blocks for {encoder.num_tokens}"
                )
            tables.append(table)
            written += table if encoder.token_ids else ()
        if len(set(written)) != len(written):
            raise PackingError("two inputs of the encoder would be written to the same block")
        return cls(tables, [part.encoder.num_tokens for part in parts if part.encoder is not None])


def slots_of(table: Sequence[int], first: int, end: int, block_size: int) -> IntArray:
    """Slots of positions first … end − 1 of the encoder's input, int64 [end − first]."""
    blocks, offsets = np.divmod(np.arange(first, end, dtype=np.int64), block_size)
    slots: IntArray = np.asarray(table, dtype=np.int64)[blocks] * block_size + offsets
    return slots
