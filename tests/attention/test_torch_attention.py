"""The torch backend against a slow oracle that walks over queries one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from kvpool.worker_service.attention.invariance import FIXED_SHAPES, OWN_SUMS
from kvpool.worker_service.attention.layer import AttentionCall, KVLayer
from kvpool.worker_service.attention.packing import one_group, pack
from kvpool.worker_service.attention.softmax import (
    KeyRange,
    PartialAttention,
    attend,
    attend_plainly,
    attend_publicly,
    fused_cpu_attention_works,
)
from kvpool.worker_service.attention.torch_backend import FREE_SHAPES, AttentionPiece, TorchAttention, merge
from kvpool.worker_service.attention.torch_plan import PlanShapes
from tests.attention.part import Part

BLOCK_SIZE = 4
NEVER = 1 << 60
SHORT_SHAPES = PlanShapes(partition=12, row_multiple=4, key_multiple=4, value_multiple=4)
"""Many segments, of which blocks share none with others."""
EACH_SHAPES = pytest.mark.parametrize(
    "shapes",
    [FIXED_SHAPES[0], SHORT_SHAPES, FREE_SHAPES, OWN_SUMS],
    ids=["256", "short", "free", "own_sums"],
)


@dataclass(frozen=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    k_dim: int = 8
    v_dim: int = 8


class Scene:
    """Sequences with random K and V, of which all but the last few positions lie in a NaN-filled paged cache."""

    def __init__(
        self, lengths: list[tuple[int, int]], shape: Shape, window: int | None, shared_tokens: int = 0
    ) -> None:
        """lengths: (tokens in the cache, new tokens) per sequence; all share the KV of the first shared_tokens."""
        assert shared_tokens % BLOCK_SIZE == 0
        torch.manual_seed(0)
        self.lengths, self.shape = lengths, shape
        num_blocks = 1 + sum(-(-(start + new) // BLOCK_SIZE) for start, new in lengths)
        self.num_blocks = num_blocks
        cache_shape = (num_blocks, BLOCK_SIZE, shape.kv_heads)
        self.layer = KVLayer(
            0,
            window,
            torch.full((*cache_shape, shape.k_dim), float("nan")),
            torch.full((*cache_shape, shape.v_dim), float("nan")),
        )
        self.layer.k_cache[0] = self.layer.v_cache[0] = 0
        free = list(range(1, num_blocks))
        random.Random(1).shuffle(free)
        common_k = torch.randn(shared_tokens, shape.kv_heads, shape.k_dim)
        common_v = torch.randn(shared_tokens, shape.kv_heads, shape.v_dim)
        common = [free.pop() for _ in range(shared_tokens // BLOCK_SIZE)]
        self.keys, self.values, self.parts = [], [], []
        for start, new in lengths:
            shared = shared_tokens if start >= shared_tokens else 0
            own = start + new - shared
            key = torch.cat([common_k[:shared], torch.randn(own, shape.kv_heads, shape.k_dim)])
            value = torch.cat([common_v[:shared], torch.randn(own, shape.kv_heads, shape.v_dim)])
            table = [*common[: shared // BLOCK_SIZE], *(free.pop() for _ in range(-(-own // BLOCK_SIZE)))]
            for position in range(start):
                block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                self.layer.k_cache[block, offset] = key[position]
                self.layer.v_cache[block, offset] = value[position]
            self.keys.append(key)
            self.values.append(value)
            self.parts.append(Part([0] * new, start, (table,)))
        self.query = torch.randn(1, shape.heads, sum(new for _, new in lengths), shape.k_dim)

    def paged(self, call: AttentionCall, min_shared_tokens: int, shapes: PlanShapes = FIXED_SHAPES[0]) -> torch.Tensor:
        backend = TorchAttention(torch.float32, min_shared_tokens, shapes)
        backend.begin(pack(self.parts, BLOCK_SIZE, one_group(self.num_blocks), torch.device("cpu")))
        new_k = torch.cat([key[start:] for key, (start, _) in zip(self.keys, self.lengths, strict=True)])
        new_v = torch.cat([value[start:] for value, (start, _) in zip(self.values, self.lengths, strict=True)])
        return backend.attend(self.layer, self.query, new_k.transpose(0, 1)[None], new_v.transpose(0, 1)[None], call)

    def oracle(self, call: AttentionCall) -> torch.Tensor:
        rows, index = [], 0
        for key, value, (start, new) in zip(self.keys, self.values, self.lengths, strict=True):
            for position in range(start, start + new):
                first = 0 if call.window is None else max(0, position + 1 - call.window)
                seen = slice(first, position + 1)
                rows.append(self._one_query(self.query[0, :, index], key[seen], value[seen], call))
                index += 1
        return torch.stack(rows)[None]

    def _one_query(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        kv_heads = [head // (self.shape.heads // self.shape.kv_heads) for head in range(self.shape.heads)]
        scores = (key[:, kv_heads].double() * query.double()).sum(-1) * call.scaling
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        if call.sinks is not None:
            scores = torch.cat([scores, call.sinks[None].double()])
        weights = scores.softmax(0)[: len(key)]
        return (weights[..., None] * value[:, kv_heads].double()).sum(0).float()


@cache
def truth(
    lengths: tuple[tuple[int, int], ...], shape: Shape, call: AttentionCall, shared_tokens: int = 0
) -> torch.Tensor:
    """The oracle's output for such a scene, which is the same every time."""
    return Scene([*lengths], shape, call.window, shared_tokens).oracle(call)


DECODES = [(7, 1), (30, 1), (3, 1), (64, 1), (29, 1)]
MIXED = [(0, 9), (12, 7), (30, 1), (0, 1), (16, 7), (41, 1), (8, 20)]
LONG = [(600, 1), (250, 270), (5, 1), (0, 300)]
"""Over one and two borders of segments of 256 keys."""


@EACH_SHAPES
@pytest.mark.parametrize("lengths", [DECODES, MIXED, LONG], ids=["decodes", "mixed", "long"])
@pytest.mark.parametrize(
    ("shape", "call"),
    [
        (Shape(), AttentionCall(0.3)),
        (Shape(kv_heads=6), AttentionCall(0.3)),
        (Shape(kv_heads=1, v_dim=5), AttentionCall(0.3)),
        (Shape(), AttentionCall(0.3, window=8)),
        (Shape(v_dim=5), AttentionCall(0.3, window=1)),
        (Shape(), AttentionCall(1.0, softcap=2.0)),
        (Shape(), AttentionCall(1.0, window=6, softcap=2.0)),
        (Shape(), AttentionCall(0.5, sinks=torch.linspace(-1, 3, 6))),
        (Shape(), AttentionCall(0.5, window=270, sinks=torch.linspace(-1, 3, 6))),
    ],
    ids=["gqa", "mha", "mqa_other_v", "window", "window_1", "softcap", "softcap_window", "sinks", "sinks_window"],
)
def test_equals_the_oracle(
    lengths: list[tuple[int, int]], shape: Shape, call: AttentionCall, shapes: PlanShapes
) -> None:
    scene = Scene(lengths, shape, call.window)
    result = scene.paged(call, NEVER, shapes)
    assert result.is_contiguous()
    torch.testing.assert_close(result, truth(tuple(lengths), shape, call), rtol=1e-5, atol=1e-5)


@EACH_SHAPES
@pytest.mark.parametrize("lengths", [DECODES, MIXED, [(28, 1), (20, 5), (24, 5), (3, 1), (22, 1)]])
@pytest.mark.parametrize(
    ("shape", "call"),
    [
        (Shape(), AttentionCall(0.3)),
        (Shape(v_dim=5), AttentionCall(0.3)),
        (Shape(), AttentionCall(1.0, softcap=2.0)),
        (Shape(), AttentionCall(0.5, sinks=torch.linspace(-1, 3, 6))),
        (Shape(), AttentionCall(0.5, window=9)),
    ],
    ids=["gqa", "other_v", "softcap", "sinks", "window"],
)
def test_a_prefix_attended_once_equals_the_oracle(
    lengths: list[tuple[int, int]], shape: Shape, call: AttentionCall, shapes: PlanShapes
) -> None:
    """Merging by log-sum-exp is exact in float32, also beside sequences that share nothing."""
    scene = Scene(lengths, shape, call.window, shared_tokens=16)
    expected = truth(tuple(lengths), shape, call, shared_tokens=16)
    torch.testing.assert_close(scene.paged(call, 1, shapes), expected, rtol=1e-5, atol=1e-5)


def test_new_kv_is_written_to_its_slots_and_nowhere_else() -> None:
    scene = Scene(MIXED, Shape(), None)
    before = scene.layer.k_cache.clone()
    scene.paged(AttentionCall(0.3), NEVER)
    for key, part in zip(scene.keys, scene.parts, strict=True):
        for position in range(len(key)):
            block, offset = part.block_tables[0][position // BLOCK_SIZE], position % BLOCK_SIZE
            assert torch.equal(scene.layer.k_cache[block, offset], key[position])
    written = int((before.isnan() & ~scene.layer.k_cache.isnan()).all(-1).all(-1).sum())
    assert written == sum(new for _, new in MIXED)
    assert not scene.layer.k_cache[0].any()


def test_the_oracle_would_see_a_wrong_window() -> None:
    scene = Scene(MIXED, Shape(), 8)
    result = scene.paged(AttentionCall(0.3, window=8), NEVER)
    assert not torch.allclose(result, scene.oracle(AttentionCall(0.3, window=9)), atol=1e-3)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("v_dim", [8, 5])
def test_all_ways_to_attend_agree(masked: bool, v_dim: int) -> None:
    torch.manual_seed(2)
    query, key, value = torch.randn(2, 6, 3, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, v_dim)
    mask = torch.zeros(2, 1, 3, 40).masked_fill_(torch.rand(2, 1, 3, 40) < 0.5, float("-inf")) if masked else None
    keys = KeyRange(key, value, mask)
    plain = attend_plainly(query, keys, 0.4)
    chosen = attend(query, keys, 0.4)
    public = attend_publicly(query, keys, 0.4)
    torch.testing.assert_close(chosen.out, plain.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(public.out, plain.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(chosen.lse, plain.lse, rtol=1e-5, atol=1e-5)


def test_halves_merge_to_the_whole() -> None:
    """Any cut of the keys, merged, is attention over all of them."""
    torch.manual_seed(2)
    query, key, value = torch.randn(1, 6, 3, 8), torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)
    first, second = (
        attend(query, KeyRange(key[:, :, cut], value[:, :, cut]), 0.4) for cut in (slice(13), slice(13, 40))
    )
    whole = attend(query, KeyRange(key, value), 0.4)
    halves = merge([AttentionPiece(None, by_row(first), True), AttentionPiece(None, by_row(second), False)], 3)
    torch.testing.assert_close(halves, by_row(whole).out, rtol=1e-5, atol=1e-5)


def by_row(attended: PartialAttention) -> PartialAttention:
    """[1, H, T, …] → [T, H, …]."""
    assert attended.lse is not None
    return PartialAttention(attended.out[0].transpose(0, 1), attended.lse[0].transpose(0, 1))


def test_this_torch_has_the_fused_cpu_kernel() -> None:
    """If this fails after an upgrade of torch, everything still works, but decoding on a CPU is several times slower."""
    assert fused_cpu_attention_works()
