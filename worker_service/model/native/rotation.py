"""How the heads of Q and K are rotated, found by trying the model's own tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ...native.description import RotaryDescription
from .observation import ModuleCall, Observation, difference, factor


class Table:
    """cos and sin of a rotary module."""

    def __init__(self, call: ModuleCall, positions: torch.Tensor, max_model_len: int) -> None:
        """call: of the module, at these positions."""
        self._call = call
        self._max_model_len = max_model_len
        self._described: dict[tuple[bool, bool], RotaryDescription] = {}
        self.cos, self.sin = (_pairs(table.reshape(len(positions), -1)) for table in call.outputs)
        """Cosines and sines at the observed positions, [tokens, pairs]."""

    def description(self, is_interleaved: bool, is_reversed: bool) -> RotaryDescription:
        """With all positions; the same tensors each time."""
        if (is_interleaved, is_reversed) not in self._described:
            arguments = [self._all_positions(value) for value in self._call.arguments]
            keywords = {name: self._all_positions(value) for name, value in self._call.keywords.items()}
            with torch.inference_mode():
                found = self._call.module(*arguments, **keywords)
            cos, sin = (_pairs(table.float().reshape(self._max_model_len, -1)).contiguous() for table in found)
            self._described[is_interleaved, is_reversed] = RotaryDescription(
                cos, -sin if is_reversed else sin, 2 * cos.shape[1], is_interleaved
            )
        return self._described[is_interleaved, is_reversed]

    def _all_positions(self, value: Any) -> Any:
        """The argument; all positions for those of the observed call. Modules return tables in the type of their input."""
        if not isinstance(value, torch.Tensor):
            return value
        return value.float() if value.is_floating_point() else torch.arange(self._max_model_len)[None]

    def equals(self, other: Table) -> bool:
        return torch.equal(self.cos, other.cos) and torch.equal(self.sin, other.sin)


class Rotation(NamedTuple):
    """A rotation of the leading numbers of every head."""

    table: Table
    is_interleaved: bool
    """Pairs (2i, 2i + 1); else (i, i + pairs)."""
    is_reversed: bool
    """True: the angles are negated."""

    def description(self) -> RotaryDescription:
        return self.table.description(self.is_interleaved, self.is_reversed)

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """heads: [tokens, heads, head size]"""
        cos, sin = self.table.cos[:, None], self.table.sin[:, None] * (-1 if self.is_reversed else 1)
        pairs = cos.shape[-1]
        rotated = heads.clone()
        if self.is_interleaved:
            left, right = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        else:
            left, right = slice(0, pairs), slice(pairs, 2 * pairs)
        rotated[..., left] = heads[..., left] * cos - heads[..., right] * sin
        rotated[..., right] = heads[..., right] * cos + heads[..., left] * sin
        return rotated


def rotary_tables(seen: Observation, max_model_len: int) -> list[Table]:
    """The distinct ones of the forward pass: outputs of two tensors with a row per token."""
    tables: list[Table] = []
    for call in seen.calls:
        if len(call.outputs) == 2 and all(table.shape[:-1].numel() == len(seen.positions) for table in call.outputs):
            table = Table(call, seen.positions, max_model_len)
            if not any(table.equals(known) for known in tables):
                tables.append(table)
    return tables


def find_rotation(
    before: torch.Tensor, after: torch.Tensor, head_size: int, tables: Sequence[Table], tolerance: float
) -> tuple[Rotation | None, float] | None:
    """The rotation (None: none) and then the factor that turn `before` into `after`, both [tokens, heads · head size] float32.
    None if none does within `tolerance`."""
    heads = before.view(len(before), -1, head_size)
    best, least = None, tolerance
    for rotation in _candidates(head_size, tables):
        rotated = before if rotation is None else rotation.apply(heads).flatten(1)
        scale = factor(rotated, after, [1.0, head_size**-0.5])
        error = difference(rotated * scale, after)
        if error <= least:
            best, least = (rotation, scale), error
    return best


def _candidates(head_size: int, tables: Sequence[Table]) -> Iterator[Rotation | None]:
    yield None
    for table in tables:
        if 2 * table.cos.shape[1] <= head_size:
            for is_interleaved in (False, True):
                for is_reversed in (False, True):
                    yield Rotation(table, is_interleaved, is_reversed)


def _pairs(table: torch.Tensor) -> torch.Tensor:
    """A column per pair of numbers, of a table [tokens, numbers] that repeats the columns or has them once."""
    half = table.shape[1] // 2
    if torch.equal(table[:, :half], table[:, half : 2 * half]):
        return table[:, :half]
    if torch.equal(table[:, 0 : 2 * half : 2], table[:, 1 : 2 * half : 2]):
        return table[:, : 2 * half : 2]
    return table
