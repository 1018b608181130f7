"""How much memory the states of recurrent layers get, and what a start says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.worker_service.model.errors import KVCacheTooLarge, ModelError
from kvpool.worker_service.model.forward.kv_plan import KVCachePlan, StatesPlan
from kvpool.worker_service.model.memory.plan import MemoryFacts, MemorySettings, plan_memory
from kvpool.worker_service.model.memory.split import GroupNeeds

GIB = 1 << 30
MIB = 1 << 20
STATE = 8 * MIB
PER_TOKEN = 12 << 10
FACTS = MemoryFacts("cpu", 64 * GIB, 0, 4 * GIB, 0, PER_TOKEN, STATE)
GPU = replace(FACTS, device="cuda:0")
SETTINGS = MemorySettings(block_size=16, max_num_seqs=8)
FULL = [GroupNeeds(None, PER_TOKEN)]
WINDOW = [GroupNeeds(512, PER_TOKEN)]
BY_NEED = 8 * 4 + 1
"""Blocks for eight sequences, and the null block."""


def states(plan: KVCachePlan) -> StatesPlan:
    assert plan.states is not None
    return plan.states


@pytest.mark.parametrize("facts", [FACTS, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("groups", [FULL, WINDOW, FULL + WINDOW], ids=["full", "window", "both"])
def test_states_get_what_the_sequences_need_and_the_rest_is_for_attention(
    facts: MemoryFacts, groups: list[GroupNeeds]
) -> None:
    budget = plan_memory(facts, replace(SETTINGS, kv_cache_memory=2 * GIB), groups)
    plan = budget.kv_cache
    assert states(plan) == StatesPlan(BY_NEED, STATE)
    assert states(plan).total_bytes == BY_NEED * STATE
    assert plan.total_bytes <= 2 * GIB
    one_more = sum(16 * group.bytes_per_token for group in plan.groups)
    assert plan.total_bytes + one_more * 100 > 2 * GIB
    (line,) = [line for line in budget.lines() if "states" in line.what]
    assert line.num_bytes == BY_NEED * STATE
    assert line.what == f"· group {len(groups)}, states"
    assert line.why == "33 blocks of 8.00 MiB: for 8 sequences 2 each, and 2 that are kept"


def test_states_take_at_most_half_so_that_texts_find_room() -> None:
    plan = plan_memory(FACTS, replace(SETTINGS, kv_cache_memory=256 * MIB), FULL).kv_cache
    assert states(plan).num_blocks == 3 * 4 + 1
    assert states(plan).total_bytes <= 128 * MIB < states(plan).total_bytes + 4 * STATE
    assert plan.groups[0].num_blocks * 16 * PER_TOKEN > 128 * MIB


def test_a_model_without_attention_has_states_alone() -> None:
    facts = replace(FACTS, bytes_per_token=0)
    plan = plan_memory(facts, replace(SETTINGS, kv_cache_memory=1 * GIB), []).kv_cache
    assert plan == KVCachePlan(16, (), states=StatesPlan(128, STATE))
    assert plan.concurrency(100_000) == 127
    assert plan_memory(facts, replace(SETTINGS, num_blocks=40), []).kv_cache.states == StatesPlan(40, STATE)


def test_the_number_of_blocks_can_be_set() -> None:
    budget = plan_memory(FACTS, replace(SETTINGS, kv_cache_memory=2 * GIB, state_blocks=100), FULL)
    assert states(budget.kv_cache).num_blocks == 100
    assert budget.kv_cache.total_bytes <= 2 * GIB
    assert any(line.why == "100 blocks of 8.00 MiB, --state-blocks" for line in budget.lines())
    assert states(plan_memory(FACTS, replace(SETTINGS, num_blocks=50, state_blocks=9), FULL).kv_cache).num_blocks == 9


def test_without_attention_the_number_of_blocks_is_that_of_states_unless_that_is_set() -> None:
    facts = replace(FACTS, bytes_per_token=0)
    for settings, count in (
        (replace(SETTINGS, num_blocks=50), 50),
        (replace(SETTINGS, num_blocks=50, state_blocks=9), 9),
    ):
        assert states(plan_memory(facts, settings, []).kv_cache).num_blocks == count


def test_a_setting_for_states_that_there_are_not_is_refused() -> None:
    with pytest.raises(ModelError, match="no recurrent layers: leave out --state-blocks"):
        plan_memory(replace(FACTS, state_bytes=0), replace(SETTINGS, state_blocks=5), FULL)


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(KVCacheTooLarge, match=r"A KV cache of 10 \+ 33 blocks needs .* At most .* \+ 9 blocks fit"):
        plan_memory(replace(FACTS, total_bytes=4 * GIB + 160 * MIB), replace(SETTINGS, num_blocks=10), FULL)
    with pytest.raises(ModelError, match=r"too small: at least 2 are needed .* 16\.38 MiB"):
        plan_memory(FACTS, replace(SETTINGS, kv_cache_memory=MIB), FULL)


def test_the_log_has_a_line_for_each_group() -> None:
    plan = KVCachePlan.one_group(101, 16, PER_TOKEN, StatesPlan(33, STATE))
    assert plan.total_bytes == 101 * 16 * PER_TOKEN + 33 * STATE
    assert plan.describe(1600).splitlines() == [
        "KV cache: 282.94 MiB in 2 groups, blocks of 16 tokens; at 1,600 tokens per sequence 1.00 at once",
        "group 0 (full attention): 18.94 MiB, 100 blocks of 192.00 KiB",
        "group 1 (states): 264.00 MiB, 32 blocks of 8.00 MiB",
    ]
