"""The size of the KV cache: what is asked for, what fits, and how it is told."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from worker_service.model.errors import KVCacheTooLarge, ModelError
from worker_service.model.kv_cache import KVCache, KVCachePlan, plan_kv_cache
from worker_service.model.layers import AttentionLayer

CPU = torch.device("cpu")
LAYERS = [
    AttentionLayer("a", torch.nn.Identity(), num_kv_heads=2, k_head_dim=8, v_head_dim=8, window=None),
    AttentionLayer("b", torch.nn.Identity(), num_kv_heads=1, k_head_dim=12, v_head_dim=4, window=8),
]
BYTES_PER_TOKEN = (2 * 16 + 16) * 2
FREE = 10_000_000


def plan(
    block_size: int = 16, num_blocks: int | None = None, memory: int | None = None, free: int = FREE
) -> KVCachePlan:
    return plan_kv_cache(LAYERS, torch.bfloat16, CPU, free, block_size, num_blocks, memory)


def test_by_number_of_blocks() -> None:
    made = plan(num_blocks=10)
    assert (made.num_blocks, made.capacity, made.bytes_per_token) == (10, 9, BYTES_PER_TOKEN)
    assert made.total_bytes == 10 * 16 * BYTES_PER_TOKEN


def test_by_memory_takes_whole_blocks() -> None:
    assert plan(memory=16 * BYTES_PER_TOKEN * 7 + 100).num_blocks == 7


def test_by_default_a_share_of_what_is_free() -> None:
    assert plan().total_bytes == pytest.approx(FREE * 0.2, rel=0.01)


def test_the_line_for_the_log() -> None:
    assert plan(num_blocks=101).describe(max_model_len=170) == (
        "KV cache: 151.50 KiB, 100 blocks of 16 tokens = 1,600 tokens; at 170 tokens per sequence 9.09 at once"
    )


def test_too_large_names_the_largest_that_fits() -> None:
    with pytest.raises(KVCacheTooLarge, match=r"at most 6510 blocks fit \(--num-blocks 6510"):
        plan(num_blocks=6511)
    assert plan(num_blocks=6510).num_blocks == 6510


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 1}, "at least 2 are needed"),
        ({"memory": 1000}, "--kv-cache-memory"),
        ({"num_blocks": 4, "memory": 4}, "not both"),
        ({"block_size": 12}, "power of two"),
        ({"block_size": 0}, "power of two"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        plan(**settings)


def test_tensors_have_the_layout_and_the_null_block_stays_zero() -> None:
    cache = KVCache(plan(num_blocks=5, block_size=4), LAYERS, torch.bfloat16, CPU)
    assert [tuple(layer.k_cache.shape) for layer in cache.layers] == [(5, 4, 2, 8), (5, 4, 1, 12)]
    assert [tuple(layer.v_cache.shape) for layer in cache.layers] == [(5, 4, 2, 8), (5, 4, 1, 4)]
    assert [layer.window for layer in cache.layers] == [None, 8]
    cache.fill(float("nan"))
    for layer in cache.layers:
        assert not layer.k_cache[0].any()
        assert layer.v_cache[1:].isnan().all()


def test_memory_is_taken_as_it_is_touched() -> None:
    """A cache of a gigabyte costs next to nothing before its blocks are used; each tensor is zero and aligned."""
    size = 1 << 30
    made = plan(memory=size, free=8 * size)
    before = resident_bytes()
    cache = KVCache(made, LAYERS, torch.bfloat16, CPU)
    assert made.total_bytes > 0.99 * size
    assert resident_bytes() - before < size // 20
    for layer in cache.layers:
        for tensor in (layer.k_cache, layer.v_cache):
            assert tensor.data_ptr() % 64 == 0
            assert not tensor[-1].any()
    cache.layers[0].k_cache.fill_(1.0)
    assert resident_bytes() - before > size // 4


def resident_bytes() -> int:
    """Memory that this process really has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
