"""Finds shapes with which attention is batch-invariant on this machine, by trials with the model's heads.

The order in which a BLAS adds the terms of a sum depends on the CPU, and on the length, number and place of the rows. So nothing is
assumed: a text is computed at once; then pieces of it are computed alone, with other texts and at other offsets, with every number
of keys that a product may have. The bits of each row must be the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ..step import SequencePart
from .layer import AttentionCall, KVLayer, LayerNeeds
from .layout import BlockGroup
from .packing import Packer
from .torch_backend import TorchAttention
from .torch_plan import PlanShapes


def fixed_shapes(partition: int) -> PlanShapes:
    """Shapes that limit the rows and keys of a product to few numbers. partition: a multiple of 16."""
    key_multiple = next(multiple for multiple in (64, 32, 16) if partition % multiple == 0)
    return PlanShapes(partition, row_multiple=16, key_multiple=key_multiple)


FIXED_SHAPES = tuple(fixed_shapes(partition) for partition in (256, 192, 128, 96, 64, 32, 16))
"""Shapes in the order of the trials: longer segments need fewer calls and fewer merges."""
OWN_SUMS = PlanShapes(partition=256, row_multiple=1, key_multiple=1, own_sums=True)
"""The last resort: independent of the BLAS, many times slower."""

_VALUE_MULTIPLE = 4
_BLOCK_SIZE = 16
_MAX_KV_HEADS = 4
"""KV heads in a trial at most: more only add products of the same shape."""
_MANY_ROWS = (33, 193, 769)
"""Rows of a chunk: kernels change their tiling at some number of rows, torch's fused one at 192 and at 768."""
_PRIME = 65_537
"""Random numbers drawn; larger tensors repeat them. Rows still differ, because no row size divides a prime."""
_SCORE_DEVIATION = 1.0
"""Standard deviation of the scores: every key has a noticeable weight in the sum."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The self-test's result for the layers of a model."""

    shapes: PlanShapes
    """Shapes to use, whether or not they hold."""
    holds: bool
    """Whether a row has the same bits in every step."""
    rejected: tuple[tuple[PlanShapes, str], ...]
    """Shapes tried before, which are not batch-invariant here, and the first difference found."""
    seconds: float

    @property
    def how(self) -> str:
        """What makes it batch-invariant, in a few words."""
        if self.shapes.own_sums:
            return "sums in a fixed order, which is slow"
        padded = f", value heads padded to a multiple of {self.shapes.value_multiple}"
        return f"partitions of {self.shapes.partition} keys{padded if self.shapes.value_multiple > 1 else ''}"

    def describe(self) -> str:
        """One line for the log: the choice, and why longer partitions were rejected."""
        why = "".join(f"; {shapes.partition} does not hold: {difference}" for shapes, difference in self.rejected[:1])
        if not self.holds:
            return f"not batch-invariant: no partition and no order of sums holds on this CPU{why}"
        return f"batch-invariant by {self.how} (self-test {self.seconds:.1f} s){why}"


def find_shapes(needs: Sequence[LayerNeeds]) -> Finding:
    """The largest partition with which attention in float32 on the CPU is batch-invariant for all of these layers.

    Call it in the thread that will run the steps, with their number of threads. Takes some tenths of a second; results are cached
    per shape of layer.
    """
    started = time.monotonic()
    rejected: list[tuple[PlanShapes, str]] = []
    for shapes in _candidates(needs):
        difference = next(
            (
                mismatch
                for each in _cases(needs, shapes)
                if (mismatch := first_difference(each, shapes, torch.get_num_threads()))
            ),
            None,
        )
        if difference is None:
            return Finding(shapes, True, tuple(rejected), time.monotonic() - started)
        rejected.append((shapes, difference))
    return Finding(FIXED_SHAPES[0], False, tuple(rejected), time.monotonic() - started)


def _candidates(needs: Sequence[LayerNeeds]) -> Iterator[PlanShapes]:
    is_odd = any(each.v_head_dim % _VALUE_MULTIPLE for each in needs)
    for shapes in FIXED_SHAPES:
        yield shapes
        if is_odd:
            yield shapes._replace(value_multiple=_VALUE_MULTIPLE)
    yield OWN_SUMS


def _cases(needs: Sequence[LayerNeeds], shapes: PlanShapes) -> list[LayerNeeds]:
    """The distinct shapes of layers. A window is changed to one that begins and ends in the text."""
    assert shapes.partition is not None
    return list(dict.fromkeys(_case(each, shapes.partition) for each in needs))


def _case(needs: LayerNeeds, partition: int) -> LayerNeeds:
    window = None if needs.window is None else partition + 9
    kv_heads = needs.num_kv_heads
    if kv_heads > _MAX_KV_HEADS:  # an even number stays even, so that rows in memory keep their alignment
        kv_heads = _MAX_KV_HEADS - kv_heads % 2
    groups = needs.num_heads // needs.num_kv_heads
    # Cross attention calls the same products with the same shapes, and a bias is added element by element.
    heads = needs._replace(num_heads=groups * kv_heads, num_kv_heads=kv_heads)
    return heads._replace(window=window, is_cross=False, has_bias=False)


@lru_cache(maxsize=256)
def first_difference(needs: LayerNeeds, shapes: PlanShapes, num_threads: int) -> str | None:
    """The first difference in bits for such a layer; None if there is none. num_threads is only part of the cache key."""
    with torch.inference_mode():
        return _Trial(needs, shapes).run()


class _Text(NamedTuple):
    """Random q, k and v [T, H, D] of a sequence, and the attention of all its rows computed at once."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    block_table: list[int]
    at_once: list[torch.Tensor]
    """[T, Hq, Dv]; empty until it is computed."""


_LONG, _MAIN, _SHARER, _OTHER, _THIRD = range(5)
"""Texts. _MAIN and _SHARER begin with the same segment, in the same blocks."""
_Pieces = list[tuple[int, int, int]]
"""(text, first position, end) of each piece of a step."""


class _Trial:
    """The trial of one shape of layer under one choice of shapes."""

    def __init__(self, needs: LayerNeeds, shapes: PlanShapes) -> None:
        assert shapes.partition is not None
        self._needs, self._partition = needs, shapes.partition
        self._step = max(shapes.key_multiple, _BLOCK_SIZE)
        self._random = torch.Generator().manual_seed(0)
        self._texts = self._make_texts()
        num_blocks = 1 + max(block for text in self._texts for block in text.block_table)
        self._packer = Packer(_BLOCK_SIZE, [BlockGroup(num_blocks)], torch.device("cpu"))
        self._backend = TorchAttention(torch.float32, min_shared_tokens=1, shapes=shapes)
        size = (num_blocks, _BLOCK_SIZE, needs.num_kv_heads)
        caches = (torch.zeros(*size, needs.k_head_dim), torch.zeros(*size, needs.v_head_dim))
        self._layer = KVLayer(0, needs.window, *caches)
        sinks = self._normal(needs.num_heads) if needs.has_sinks else None
        self._call = AttentionCall(needs.scaling, needs.window, needs.softcap, sinks)

    def run(self) -> str | None:
        """The first difference; None if there is none."""
        for pieces in self._steps():
            at_once = [self._at_once(index) for index, _, _ in pieces]
            for (_, first, end), rows, expected in zip(pieces, self._attend(pieces), at_once, strict=True):
                different = (rows != expected[first:end]).flatten(1).any(1)
                if different.any():
                    return self._describe(pieces, first, end, int(different.sum()))
        return None

    def _steps(self) -> Iterator[_Pieces]:
        """Pieces of each step of the trial; the steps that find most come first."""
        partition = self._partition
        # At once, the causal tile of a segment has all keys; the start of a text has fewer. Every cut is tried.
        yield from ([(_MAIN, 0, end)] for end in range(self._step, partition, self._step))
        # Places of a row in its tile.
        yield from (
            [(_MAIN, partition // 2 - shift, partition // 2 + 1)] for shift in range(1, min(20, partition // 2))
        )
        # One row alone.
        borders = range(16, partition + 33, 32 if partition > 64 else 16)
        yield from ([(_MAIN, position, position + 1)] for border in borders for position in (border - 2, border))
        # Chunks.
        for length in (7, 17, 40):
            yield from ([(_MAIN, first, first + length)] for first in range(0, partition, partition // 3 + length))
        # With other texts: the same kind of tile, and other kinds.
        middle, border = partition // 2, partition + 3
        yield [(_OTHER, middle, middle + 1), (_MAIN, middle - 1, middle), (_THIRD, 2, 3)]
        yield [(_OTHER, border, border + 5), (_LONG, middle, middle + 5), (_MAIN, middle + 3, middle + 8)]
        yield [(_THIRD, 0, partition), (_MAIN, border, border + 1), (_OTHER, 0, partition), (_LONG, middle, border)]
        # A segment attended once for its sharers.
        for length in (1, 3, 18):
            yield [(_SHARER, partition, partition + length), (_OTHER, 3, 9), (_MAIN, border, border + 1)]
        # Many rows.
        yield from ([(_LONG, partition + 5, partition + 5 + rows)] for rows in _MANY_ROWS)

    def _at_once(self, index: int) -> torch.Tensor:
        """Attention [T, Hq, Dv] of the whole text in one step. Leaves its KV in its blocks."""
        text = self._texts[index]
        if not text.at_once:
            text.at_once.extend(self._attend([(index, 0, len(text.query))]))
        return text.at_once[0]

    def _attend(self, pieces: _Pieces) -> list[torch.Tensor]:
        """Attention [T, Hq, Dv] of each piece, computed in one step."""
        packing = self._packer.pack(
            [
                SequencePart([0] * (end - first), first, (self._texts[index].block_table,))
                for index, first, end in pieces
            ]
        )
        query, key, value = (
            torch.cat([getattr(self._texts[index], name)[first:end] for index, first, end in pieces])
            for name in ("query", "key", "value")
        )
        self._backend.begin(packing)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        out = self._backend.attend(self._layer, query, key, value, self._call)[0]
        return list(torch.split(out, packing.query_lens))

    def _make_texts(self) -> list[_Text]:
        partition = self._partition
        short = partition + 80
        texts: list[_Text] = []
        num_blocks = 1
        for length in (partition + _MANY_ROWS[-1] + 5, short, short, short, short):
            table = list(range(num_blocks, num_blocks + -(-length // _BLOCK_SIZE)))
            num_blocks += len(table)
            texts.append(self._make_text(length, table))
        main, sharer = texts[_MAIN], texts[_SHARER]
        shared = partition // _BLOCK_SIZE
        sharer.block_table[:shared] = main.block_table[:shared]
        for ours, theirs in ((sharer.key, main.key), (sharer.value, main.value)):
            ours[:partition] = theirs[:partition]
        return texts

    def _make_text(self, length: int, table: list[int]) -> _Text:
        needs = self._needs
        # A product of two standard normal vectors of D numbers deviates by √D.
        factor = _SCORE_DEVIATION / (needs.scaling * needs.k_head_dim**0.5)
        query = self._normal(length, needs.num_heads, needs.k_head_dim) * factor
        key = self._normal(length, needs.num_kv_heads, needs.k_head_dim)
        return _Text(query, key, self._normal(length, needs.num_kv_heads, needs.v_head_dim), table, [])

    def _normal(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(_PRIME, generator=self._random)
        size = math.prod(shape)
        return drawn.repeat(-(-size // _PRIME))[:size].view(shape)

    def _describe(self, pieces: _Pieces, first: int, end: int, num_different: int) -> str:
        needs = self._needs
        company = "alone" if len(pieces) == 1 else "with other texts"
        return (
            f"{num_different} of the rows {first} … {end - 1}, computed {company}, have other bits than at once "
            f"({needs.num_heads} heads, {needs.num_kv_heads} KV heads, head sizes {needs.k_head_dim} and {needs.v_head_dim})"
        )
