"""How large a KV cache is planned, by made-up facts: never more than fits, and errors whose figures are right."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ByteSize, TypeAdapter

from kvpool.worker_service.model.errors import KVCacheTooLarge, ModelError
from kvpool.worker_service.model.forward.kv_plan import KVCachePlan, show_bytes
from kvpool.worker_service.model.memory.plan import MemoryFacts, plan_memory
from kvpool.worker_service.model.settings import MemorySettings

GIB = 1 << 30
GPU = MemoryFacts(
    device="cuda:0",
    total_bytes=80 * GIB,
    other_bytes=2 * GIB,
    weight_bytes=16 * GIB,
    activation_bytes=3 * GIB,
    bytes_per_token=1 << 17,
)
CPU = MemoryFacts(
    device="cpu",
    total_bytes=16 * GIB,
    other_bytes=5 * GIB,
    weight_bytes=1 * GIB,
    activation_bytes=GIB // 4,
    bytes_per_token=1 << 15,
    activations_from="estimated",
)
SETTINGS = MemorySettings(block_size=16)

FACTS = st.builds(
    MemoryFacts,
    device=st.sampled_from(["cpu", "cuda:1"]),
    total_bytes=st.integers(1, 1 << 41),
    other_bytes=st.integers(0, 1 << 40),
    weight_bytes=st.integers(0, 1 << 40),
    activation_bytes=st.integers(0, 1 << 36),
    bytes_per_token=st.integers(1, 1 << 22),
    workspace_bytes_per_token=st.integers(0, 1 << 20),
)
WISHES = st.builds(
    MemorySettings,
    block_size=st.sampled_from([1, 2, 16, 256]),
    gpu_memory_utilization=st.floats(0.001, 1),
)


def spent(facts: MemoryFacts, plan: KVCachePlan) -> int:
    """All that is in use on the device in a maximum batch that reads the whole cache."""
    workspace = plan.only_pool.num_blocks * plan.block_size * facts.workspace_bytes_per_token
    beside = facts.other_bytes + facts.weight_bytes + facts.activation_bytes
    return beside + plan.total_bytes + workspace


def refusal(facts: MemoryFacts, settings: MemorySettings) -> str | None:
    """What is said against the settings, if anything."""
    try:
        plan_memory(facts, settings)
    except ModelError as error:
        return str(error)
    return None


def fits(facts: MemoryFacts, settings: MemorySettings) -> bool:
    return refusal(facts, settings) is None


# -- the formula


BUSY = replace(CPU, activation_bytes=9 * GIB)
ROOM = (80 - 2 - 16 - 3) * GIB


@pytest.mark.parametrize(
    ("facts", "wish", "num_bytes"),
    [
        pytest.param(CPU, {}, GIB * 2, id="a CPU gives a fifth of what is free"),
        pytest.param(BUSY, {}, GIB, id="and less where a maximum batch needs nearly everything"),
        pytest.param(CPU, {"num_blocks": 10}, 10 * 16 << 15, id="by number of blocks"),
        pytest.param(CPU, {"kv_cache_memory": 7 * (16 << 15) + 100}, 7 * 16 << 15, id="by memory: whole blocks"),
        pytest.param(GPU, {"num_blocks": ROOM // (16 << 17)}, ROOM, id="by name more than the share of a GPU"),
    ],
)
def test_the_size_of_a_cache(facts: MemoryFacts, wish: dict[str, int], num_bytes: int) -> None:
    plan = plan_memory(facts, replace(SETTINGS, **wish)).kv_cache
    assert plan.total_bytes == pytest.approx(num_bytes, rel=1e-3 if facts is CPU and not wish else 0)
    assert plan.only_pool.capacity == plan.only_pool.num_blocks - 1


@given(FACTS, WISHES)
def test_never_more_than_fits_and_the_lines_add_up(facts: MemoryFacts, settings: MemorySettings) -> None:
    """On a GPU all users together take the share of it, but for less than a block; nowhere is more spent than there is. A refusal
    on a GPU means that the smallest cache would be more than the share."""
    usable = facts.total_bytes * settings.gpu_memory_utilization
    try:
        budget = plan_memory(facts, settings)
    except KVCacheTooLarge:
        smallest = KVCachePlan.one_group(2, settings.block_size, facts.bytes_per_token)
        assert facts.is_cpu or spent(facts, smallest) > usable - 1
        return
    total, *others = (
        line for line in budget.lines() if line.what not in ("may be used", "free with the weights loaded")
    )
    assert total.num_bytes == sum(line.num_bytes for line in others)
    plan = budget.kv_cache
    assert plan.only_pool.num_blocks >= 2
    assert spent(facts, plan) <= facts.total_bytes
    one_more = KVCachePlan.one_group(plan.only_pool.num_blocks + 1, plan.block_size, plan.bytes_per_token)
    if facts.is_cpu:
        assert plan.total_bytes <= 0.2 * facts.free_bytes + 1
    else:
        assert spent(facts, plan) <= usable + 1
        assert spent(facts, one_more) > usable - 1


# -- sizes that are asked for


@given(FACTS, st.sampled_from([1, 16, 256]), st.integers(2, 1 << 40), st.booleans())
def test_the_largest_that_an_error_names_fits_and_one_more_does_not(
    facts: MemoryFacts, block_size: int, num_blocks: int, in_bytes: bool
) -> None:
    bytes_per_block = block_size * facts.bytes_per_token

    def asked(blocks: int) -> MemorySettings:
        if in_bytes:
            return MemorySettings(block_size, kv_cache_memory=blocks * bytes_per_block)
        return MemorySettings(block_size, num_blocks=blocks)

    said = refusal(facts, asked(num_blocks))
    if said is None:
        assert spent(facts, plan_memory(facts, asked(num_blocks)).kv_cache) <= facts.total_bytes
        return
    named = re.search(r"--num-blocks (\d+), or --kv-cache-memory ([\d.]+\w*)", said)
    if named is None:
        assert "none fits" in said
        assert not fits(facts, asked(2))
        return
    largest = int(named[1])
    in_bytes_named = TypeAdapter(ByteSize).validate_python(named[2])
    assert 0.99 * largest * bytes_per_block <= in_bytes_named <= largest * bytes_per_block, "three digits, rounded down"
    assert largest < num_blocks
    assert fits(facts, asked(largest))
    assert not fits(facts, asked(largest + 1))


@given(FACTS, WISHES)
def test_the_utilization_that_an_error_names_is_enough_and_less_is_not(
    facts: MemoryFacts, settings: MemorySettings
) -> None:
    said = refusal(facts, settings)
    if said is None:
        return
    named = re.search(r"Give --gpu-memory-utilization ([\d.e-]+) or more", said)
    if named is None:
        assert facts.is_cpu or not fits(facts, replace(settings, gpu_memory_utilization=1.0))
        return
    utilization = float(named[1])
    assert 0 < utilization <= 1
    assert fits(facts, replace(settings, gpu_memory_utilization=utilization))
    if utilization > 0.002:
        assert not fits(facts, replace(settings, gpu_memory_utilization=utilization - 0.002))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (MemorySettings(16, num_blocks=1), "at least 2 are needed"),
        (MemorySettings(16, kv_cache_memory=1000), "larger --kv-cache-memory"),
        (MemorySettings(16, num_blocks=4, kv_cache_memory=4), "not both"),
        (MemorySettings(12), "power of two"),
        (MemorySettings(0), "power of two"),
    ],
)
def test_settings_that_make_no_sense(settings: MemorySettings, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        plan_memory(CPU, settings)


def test_what_an_error_says() -> None:
    with pytest.raises(KVCacheTooLarge) as caught:
        plan_memory(GPU, replace(SETTINGS, num_blocks=50_000))
    assert str(caught.value) == (
        "A KV cache of 50000 blocks needs 97.66 GiB, but cuda:0 has room for 59.00 GiB: of 80.00 GiB, 2.00 GiB are in use "
        "already, 16.00 GiB are needed for the weights and 3.00 GiB for a maximum batch. At most 30208 blocks fit "
        "(--num-blocks 30208, or --kv-cache-memory 59GiB)."
    )
    with pytest.raises(KVCacheTooLarge) as caught:
        plan_memory(GPU, replace(SETTINGS, gpu_memory_utilization=0.2))
    assert str(caught.value) == (
        "With --gpu-memory-utilization 0.2 no KV cache fits on cuda:0: at least 2 are needed (block 0 stays empty), 4.00 MiB "
        "at 2.00 MiB per block of 16 tokens, but of 80.00 GiB, 2.00 GiB are in use already, 16.00 GiB are needed for the weights "
        "and 3.00 GiB for a maximum batch. Give --gpu-memory-utilization 0.263 or more."
    )
    with pytest.raises(KVCacheTooLarge, match=r"No KV cache fits on cuda:0.* end other processes"):
        plan_memory(replace(GPU, other_bytes=70 * GIB), SETTINGS)
    with pytest.raises(KVCacheTooLarge, match=r"A fifth of the free memory of cpu holds no KV cache"):
        plan_memory(replace(CPU, other_bytes=15 * GIB - (1 << 21), activation_bytes=0), SETTINGS)


# -- what is told


def test_the_budget_of_a_gpu_line_by_line() -> None:
    budget = plan_memory(replace(GPU, workspace_bytes_per_token=1 << 15), SETTINGS)
    assert [str(line) for line in budget.lines()] == [
        "memory of cuda:0: 80.00 GiB",
        "may be used: 72.00 GiB (--gpu-memory-utilization 0.9)",
        "in use already: 2.00 GiB (other processes and the driver)",
        "weights: 16.00 GiB",
        "activations of a maximum batch: 3.00 GiB (2,048 tokens of 64 sequences, measured)",
        "graphs: 0 B (none are captured)",
        "attention's workspace: 10.20 GiB (32.00 KiB for each token that a step reads)",
        "KV cache: 40.80 GiB (20,889 blocks of 2.00 MiB, the rest of what may be used)",
        "left over: 8.00 GiB",
    ]


def test_the_budget_of_a_cpu_line_by_line() -> None:
    budget = plan_memory(CPU, replace(SETTINGS, num_blocks=101))
    assert [str(line) for line in budget.lines()] == [
        "memory of cpu: 16.00 GiB",
        "in use already: 5.00 GiB (other processes, page cache left out)",
        "weights: 1.00 GiB",
        "free with the weights loaded: 10.00 GiB",
        "activations of a maximum batch: 256.00 MiB (2,048 tokens of 64 sequences, estimated)",
        "graphs: 0 B (none are captured)",
        "KV cache: 50.50 MiB (101 blocks of 512.00 KiB, --num-blocks)",
        "left over: 9.70 GiB",
    ]
    assert "20% of the free memory" in [str(line) for line in plan_memory(CPU, SETTINGS).lines()][-2]


def test_a_plan_is_a_line_for_the_log_and_counts_whole_blocks() -> None:
    plan = KVCachePlan.one_group(num_blocks=101, block_size=16, bytes_per_token=96)
    assert plan.describe(max_model_len=170) == (
        "KV cache: 151.50 KiB, 100 blocks of 16 tokens = 1,600 tokens; at 170 tokens per sequence 9.09 at once"
    )
    assert [plan.concurrency(tokens) for tokens in (1, 16, 17, 1600)] == [100, 100, 50, 1]
    shown = [show_bytes(count) for count in (0, 1023, 1 << 10, 3 << 19, 5 << 30, -(1 << 20))]
    assert shown == ["0 B", "1023 B", "1.00 KiB", "1.50 MiB", "5.00 GiB", "-1.00 MiB"]
