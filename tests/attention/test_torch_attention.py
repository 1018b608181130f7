"""The torch backend against a slow oracle that walks over queries one by one."""

from __future__ import annotations

import pytest
import torch

from kvpool.worker_service.attention.invariance import FIXED_SHAPES, OWN_SUMS
from kvpool.worker_service.attention.layer import AttentionCall
from kvpool.worker_service.attention.softmax import (
    KeyRange,
    attend,
    attend_plainly,
    attend_publicly,
    fused_cpu_attention_works,
)
from kvpool.worker_service.attention.torch_backend import FREE_SHAPES
from kvpool.worker_service.attention.torch_plan import PlanShapes
from tests.attention.scene import BLOCK_SIZE, NEVER, Scene, Shape, truth

SHORT_SHAPES = PlanShapes(partition=12, row_multiple=4, key_multiple=4, value_multiple=4)
"""Many segments, of which blocks share none with others."""
EACH_SHAPES = pytest.mark.parametrize(
    "shapes", [FIXED_SHAPES[0], SHORT_SHAPES, FREE_SHAPES, OWN_SUMS], ids=["256", "short", "free", "own_sums"]
)
DECODES = [(7, 1), (30, 1), (3, 1), (64, 1), (29, 1)]
MIXED = [(0, 9), (12, 7), (30, 1), (0, 1), (16, 7), (41, 1), (8, 20)]
LONG = [(600, 1), (250, 270), (5, 1), (0, 300)]
"""Over one and two borders of segments of 256 keys."""


CALLS = {
    "gqa": (Shape(), AttentionCall(0.3)),
    "mha": (Shape(kv_heads=6), AttentionCall(0.3)),
    "mqa, other V": (Shape(kv_heads=1, v_dim=5), AttentionCall(0.3)),
    "window": (Shape(), AttentionCall(0.3, window=8)),
    "window of 1, other V": (Shape(v_dim=5), AttentionCall(0.3, window=1)),
    "softcap": (Shape(), AttentionCall(1.0, softcap=2.0)),
    "softcap, window": (Shape(), AttentionCall(1.0, window=6, softcap=2.0)),
    "sinks": (Shape(), AttentionCall(0.5, sinks=torch.linspace(-1, 3, 6))),
    "sinks, window": (Shape(), AttentionCall(0.5, window=270, sinks=torch.linspace(-1, 3, 6))),
    "bias": (Shape(has_bias=True), AttentionCall(0.3)),
    "bias, window": (Shape(has_bias=True), AttentionCall(0.3, window=9)),
}


@EACH_SHAPES
@pytest.mark.parametrize("lengths", [DECODES, MIXED, LONG], ids=["decodes", "mixed", "long"])
@pytest.mark.parametrize("name", CALLS)
def test_equals_the_oracle(lengths: list[tuple[int, int]], name: str, shapes: PlanShapes) -> None:
    shape, call = CALLS[name]
    result = Scene(lengths, shape, call.window).paged(call, NEVER, shapes)
    assert result.is_contiguous()
    torch.testing.assert_close(result, truth(tuple(lengths), shape, call), rtol=1e-5, atol=1e-5)


@EACH_SHAPES
@pytest.mark.parametrize("lengths", [DECODES, MIXED, [(28, 1), (20, 5), (24, 5), (3, 1), (22, 1)]])
@pytest.mark.parametrize("name", ["gqa", "mqa, other V", "window", "softcap", "sinks", "bias"])
def test_a_prefix_attended_once_equals_the_oracle(
    lengths: list[tuple[int, int]], name: str, shapes: PlanShapes
) -> None:
    """Merging by log-sum-exp is exact in float32, also beside sequences that share nothing, and with a bias of other
    distances for each."""
    shape, call = CALLS[name]
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


def test_this_torch_has_the_fused_cpu_kernel() -> None:
    """If this fails after an upgrade of torch, everything still works, but decoding on a CPU is several times slower."""
    assert fused_cpu_attention_works()
