"""The tensors of the KV cache: their layout, and the memory they take."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from kvpool.worker_service.model.forward.kv_cache import KVCache
from kvpool.worker_service.model.forward.kv_plan import KVCachePlan
from kvpool.worker_service.model.forward.layers import AttentionLayer
from kvpool.worker_service.model.memory.facts import kv_bytes_per_token

CPU = torch.device("cpu")
LAYERS = [
    AttentionLayer("a", torch.nn.Identity(), num_kv_heads=2, k_head_dim=8, v_head_dim=8, window=None),
    AttentionLayer("b", torch.nn.Identity(), num_kv_heads=1, k_head_dim=12, v_head_dim=4, window=8),
]


def plan(num_blocks: int, block_size: int = 16) -> KVCachePlan:
    return KVCachePlan.one_group(num_blocks, block_size, kv_bytes_per_token(LAYERS, torch.bfloat16))


def test_bytes_per_token_are_those_of_all_layers() -> None:
    assert kv_bytes_per_token(LAYERS, torch.bfloat16) == (2 * 16 + 16) * 2


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
    made = plan(size // plan(1).bytes_per_block)
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
