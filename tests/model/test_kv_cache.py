"""The tensors of the KV cache: their layout, and the memory they take."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvpool.worker_service.attention.layer import LayerNeeds
from kvpool.worker_service.model.forward.kv_cache import KVCache
from kvpool.worker_service.model.forward.kv_plan import GroupPlan, KVCachePlan, StatesPlan
from kvpool.worker_service.model.forward.layers import AttentionLayer, groups_of, sights
from kvpool.worker_service.model.memory.facts import kv_bytes_per_token

CPU = torch.device("cpu")
LAYERS = [
    AttentionLayer("a", torch.nn.Identity(), LayerNeeds(2, 2, 8, 8)),
    AttentionLayer("b", torch.nn.Identity(), LayerNeeds(1, 1, 12, 4, window=8)),
]


def plan(num_blocks: int, block_size: int = 16) -> KVCachePlan:
    return KVCachePlan.one_group(num_blocks, block_size, kv_bytes_per_token(LAYERS, torch.bfloat16))


def test_tensors_have_the_layout_and_the_null_block_stays_zero() -> None:
    assert kv_bytes_per_token(LAYERS, torch.bfloat16) == (2 * 16 + 16) * 2
    cache = KVCache(plan(num_blocks=5, block_size=4), LAYERS, torch.bfloat16, CPU)
    assert [tuple(layer.k_cache.shape) for layer in cache.layers] == [(5, 4, 2, 8), (5, 4, 1, 12)]
    assert [tuple(layer.v_cache.shape) for layer in cache.layers] == [(5, 4, 2, 8), (5, 4, 1, 4)]
    assert [layer.window for layer in cache.layers] == [None, 8]
    cache.fill(float("nan"))
    for layer in cache.layers:
        assert not layer.k_cache[0].any()
        assert layer.v_cache[1:].isnan().all()


def test_each_layer_has_the_blocks_of_its_group() -> None:
    """A layer with a window has those of the group with this window, or of the one that keeps everything."""
    grouped = KVCachePlan(4, (GroupPlan(0, None, 5, 1), GroupPlan(1, 8, 3, 1)))
    cache = KVCache(grouped, LAYERS, torch.bfloat16, CPU)
    assert [(layer.group, layer.window, len(layer.k_cache)) for layer in cache.layers] == [(0, None, 5), (1, 8, 3)]
    alone = KVCache(KVCachePlan.one_group(5, 4, 1), LAYERS, torch.bfloat16, CPU)
    assert [(layer.group, layer.window, len(layer.v_cache)) for layer in alone.layers] == [(0, None, 5), (0, 8, 5)]


def test_a_layer_that_reads_the_kv_of_another_one_has_its_tensors_and_writes_nothing() -> None:
    reader = LAYERS[1]._replace(name="c", needs=LAYERS[1].needs._replace(window=12), source=1)
    layers = [*LAYERS, reader]
    assert kv_bytes_per_token(layers, torch.bfloat16) == kv_bytes_per_token(LAYERS, torch.bfloat16)
    assert sights(layers) == [None, 12, 12]  # what it reads must be there
    cache = KVCache(KVCachePlan(4, (GroupPlan(0, None, 5, 1), GroupPlan(1, 12, 3, 1))), layers, torch.bfloat16, CPU)
    _, source, read = cache.layers
    assert read.k_cache is source.k_cache
    assert read.v_cache is source.v_cache
    assert (read.group, source.window, read.window) == (1, 8, 12)
    read.write(torch.tensor([4]), torch.ones(1, 1, 1, 12), torch.ones(1, 1, 1, 4))
    assert not source.k_cache.any()
    source.write(torch.tensor([4]), *(torch.ones(1, 1, 1, dim, dtype=torch.bfloat16) for dim in (12, 4)))
    assert source.k_cache[1, 0].all()


def test_groups_are_full_attention_first_then_windows_from_the_largest() -> None:
    kinds = [8, None, 512, 8, None]
    layers = [LAYERS[0]._replace(needs=LAYERS[0].needs._replace(window=window)) for window in kinds]
    layers.append(layers[0]._replace(source=3))
    assert list(groups_of(layers).items()) == [(None, [1, 4]), (512, [2]), (8, [0, 3])]
    assert list(groups_of([layers[0], layers[2]]).items()) == [(512, [1]), (8, [0])]


def test_a_plan_of_several_groups() -> None:
    made = KVCachePlan(16, (GroupPlan(0, None, 101, 96), GroupPlan(1, 40, 31, 480)))
    assert made.total_bytes == 16 * (101 * 96 + 31 * 480)
    assert made.bytes_per_token == 576
    # 1,000 tokens need 63 blocks of full attention. A window of 40 touches four blocks at most.
    assert made.concurrency(1000) == min(100 / 63, 30 / 4)
    assert made.concurrency(20) == min(100 / 2, 30 / 2)
    assert made.describe(1000).splitlines() == [
        "KV cache: 384.00 KiB in 2 groups, blocks of 16 tokens; at 1,000 tokens per sequence 1.59 at once",
        "group 0 (full attention): 151.50 KiB, 100 blocks of 1.50 KiB",
        "group 1 (window 40): 232.50 KiB, 30 blocks of 7.50 KiB",
    ]
    with_states = replace(made, states=StatesPlan(33, 8 << 20))
    assert with_states.total_bytes == made.total_bytes + 33 * (8 << 20)
    assert with_states.describe(1000).splitlines()[-1] == "group 2 (states): 264.00 MiB, 32 blocks of 8.00 MiB"


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33])
def test_a_window_touches_no_more_blocks_than_planned(window: int, block_size: int) -> None:
    planned = GroupPlan(0, window, 100, 1).blocks_per_sequence(1000, block_size)
    touched = [last // block_size - (last + 1 - window) // block_size + 1 for last in range(200, 300)]
    assert max(touched) == planned


def test_memory_is_taken_as_it_is_touched() -> None:
    """A cache of a gigabyte costs next to nothing before its blocks are used; each tensor is zero and aligned."""
    size = 1 << 30
    made = plan(size // plan(1).only_pool.bytes_per_block)
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
