"""The split of a KV cache among groups: windows, states of recurrent layers, the outputs of an encoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpool.worker_service.cache.groups.window import ring_blocks, span
from kvpool.worker_service.model.errors import KVCacheTooLarge, ModelError
from kvpool.worker_service.model.forward.kv_plan import CrossPlan, GroupPlan, KVCachePlan, StatesPlan
from kvpool.worker_service.model.length import choose_max_encoder_tokens, choose_max_model_len
from kvpool.worker_service.model.memory.facts import cross_needs, group_needs, kv_bytes_per_token
from kvpool.worker_service.model.memory.meta_model import build_meta_model
from kvpool.worker_service.model.memory.plan import MemoryBudget, MemoryFacts, plan_memory
from kvpool.worker_service.model.memory.profile import MaximumBatches
from kvpool.worker_service.model.memory.split import Split
from kvpool.worker_service.model.settings import MemorySettings
from scripts.models.subjects import default_seq2seq_config
from tests.model.truth.encoders import make as make_subject


def needs(*groups: tuple[int | None, int]) -> list[GroupPlan]:
    """Groups by window and bytes per token, without blocks."""
    return [GroupPlan(index, window, 0, size) for index, (window, size) in enumerate(groups)]


MIXED = needs((None, 1024), (512, 5 * 1024))
"""Five layers with a window for each one without."""
RING, SPAN = 65, 32
"""Of a window of 512 in blocks of 16, with chunks of 512."""
EACH = RING + 2 * SPAN
"""Blocks for a sequence."""
GIB = 1 << 30


def split(groups: list[GroupPlan], *, max_num_seqs: int = 64, window_blocks: int | None = None) -> Split:
    return Split(groups, MemorySettings(16, max_num_seqs=max_num_seqs, window_blocks=window_blocks))


def blocks(plan: KVCachePlan) -> list[int]:
    return [group.num_blocks for group in plan.groups]


def test_windows_get_what_their_sequences_need_and_the_rest_is_full_attention() -> None:
    assert (ring_blocks(512, 512, 16), ring_blocks(512, 1, 16), span(512, 16)) == (RING, SPAN + 1, SPAN)
    full, window = blocks(split(MIXED).of_bytes(8 * GIB))
    assert window == 64 * EACH + 1
    assert full == (8 * GIB - window * 16 * 5 * 1024) // (16 * 1024)


def test_with_less_memory_windows_take_at_most_half_of_it_and_with_little_all_have_as_many() -> None:
    full, window = blocks(split(MIXED).of_bytes(GIB))
    assert divmod(window - 1, EACH) == (50, 0)
    assert window * 16 * 5 * 1024 <= GIB // 2 < (window + EACH) * 16 * 5 * 1024
    assert full == (GIB - window * 16 * 5 * 1024) // (16 * 1024)
    assert blocks(split(MIXED).of_bytes(100 * 16 * 6 * 1024)) == [100, 100]


@pytest.mark.parametrize(
    ("groups", "settings", "count", "expected"),
    [
        (MIXED, {}, 20_000, [20_000, 64 * EACH + 1]),
        (MIXED, {}, 500, [500, 500]),
        (MIXED, {"max_num_seqs": 2}, 500, [500, 2 * EACH + 1]),
        (MIXED, {"window_blocks": 300}, 50, [50, 300]),
        (needs((512, 1)), {}, 500, [500]),
    ],
    ids=str,
)
def test_a_number_of_blocks_is_that_of_full_attention(
    groups: list[GroupPlan], settings: dict[str, int], count: int, expected: list[int]
) -> None:
    assert blocks(split(groups, **settings).of_blocks(count)) == expected


def test_windows_alone_share_by_their_need() -> None:
    long, short = blocks(split(needs((4096, 1024), (512, 1024))).of_bytes(GIB))
    # Chunks are as long as the larger window.
    each = [ring_blocks(window, 2048, 16) + 2 * span(window, 16) for window in (4096, 512)]
    assert long / short == pytest.approx(each[0] / each[1], rel=1e-3)
    assert GIB - 2 * 16 * 1024 <= (long + short) * 16 * 1024 <= GIB
    assert blocks(split(MIXED, window_blocks=300).of_bytes(GIB)) == [(GIB - 300 * 16 * 5 * 1024) // (16 * 1024), 300]


@given(
    st.lists(st.tuples(st.none() | st.integers(2, 3000), st.integers(1, 1 << 16)), min_size=1, max_size=4),
    st.integers(0, 1 << 34),
    st.integers(1, 300),
    st.integers(0, 1 << 12),
)
def test_a_split_never_takes_more_than_there_is(
    groups: list[tuple[int | None, int]], num_bytes: int, max_num_seqs: int, workspace: int
) -> None:
    """And groups without a window get no less than if all groups had as many blocks."""
    plan = split(needs(*groups), max_num_seqs=max_num_seqs).of_bytes(num_bytes, workspace)
    full = [group.num_blocks for group in plan.groups if group.window is None]
    windows = [group.num_blocks for group in plan.groups if group.window is not None]
    if min(full + windows) < 2:
        return  # refused
    assert len(set(full)) <= 1
    assert all(count <= full[0] for count in windows if full)
    most = max(full) if full else 0
    assert plan.total_bytes + most * 16 * workspace <= num_bytes
    if full:
        assert most >= num_bytes // (16 * (workspace + sum(size for _, size in groups)))


def facts(total_bytes: int = 8 * GIB) -> MemoryFacts:
    return MemoryFacts("cpu", total_bytes, 0, 0, 0, bytes_per_token=6 * 1024)


def test_the_budget_lists_each_group() -> None:
    budget = plan_memory(facts(), MemorySettings(16), MIXED)
    lines = [str(line) for line in budget.lines()]
    assert any(line.startswith("· group 0, full attention: ") for line in lines)
    assert any(line.endswith("for 64 sequences 65 each, and 2 windows of 32 that are kept)") for line in lines)
    assert budget.kv_cache.chunk_tokens == 512
    assert "window 512" in budget.kv_cache.describe(8192)


def test_window_blocks_without_windows_are_refused() -> None:
    with pytest.raises(ModelError, match="no sliding window: leave out --window-blocks"):
        plan_memory(facts(), MemorySettings(16, window_blocks=10), needs((None, 6 * 1024)))


def test_a_cache_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(KVCacheTooLarge, match=r"blocks fit \(--num-blocks (\d+)") as caught:
        plan_memory(facts(), MemorySettings(16, num_blocks=1 << 20), MIXED)
    fitting = int(str(caught.value).split("(--num-blocks ")[1].split(",")[0])
    assert plan_memory(facts(), MemorySettings(16, num_blocks=fitting), MIXED).kv_cache.total_bytes <= 8 * GIB


# -- states of recurrent layers


MIB = 1 << 20
STATE = 8 * MIB
PER_TOKEN = 12 << 10
OF_STATES = MemoryFacts("cpu", 64 * GIB, 0, 4 * GIB, 0, PER_TOKEN, STATE)
OF_STATES_ON_GPU = replace(OF_STATES, device="cuda:0")
FOR_EIGHT = MemorySettings(block_size=16, max_num_seqs=8)
FULL, WINDOW = needs((None, PER_TOKEN)), needs((512, PER_TOKEN))
BOTH = needs((None, PER_TOKEN), (512, PER_TOKEN))
BY_NEED = 8 * 4 + 1
"""Blocks for eight sequences, and the null block."""


def states_of(plan: KVCachePlan) -> StatesPlan:
    assert plan.states is not None
    return plan.states


@pytest.mark.parametrize("facts", [OF_STATES, OF_STATES_ON_GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("groups", [FULL, WINDOW, BOTH], ids=["full", "window", "both"])
def test_states_get_what_the_sequences_need_and_the_rest_is_for_attention(
    facts: MemoryFacts, groups: list[GroupPlan]
) -> None:
    budget = plan_memory(facts, replace(FOR_EIGHT, kv_cache_memory=2 * GIB), groups)
    plan = budget.kv_cache
    assert states_of(plan) == StatesPlan(BY_NEED, STATE)
    assert plan.total_bytes <= 2 * GIB
    one_more = sum(16 * group.bytes_per_token for group in plan.groups)
    assert plan.total_bytes + one_more * 100 > 2 * GIB
    (line,) = [line for line in budget.lines() if "states" in line.what]
    assert line.num_bytes == BY_NEED * STATE
    assert line.what == f"· group {len(groups)}, states"
    assert line.why == "33 blocks of 8.00 MiB: for 8 sequences 2 each, and 2 that are kept"


def test_states_take_at_most_half_so_that_texts_find_room() -> None:
    plan = plan_memory(OF_STATES, replace(FOR_EIGHT, kv_cache_memory=256 * MIB), FULL).kv_cache
    assert states_of(plan).num_blocks == 3 * 4 + 1
    num_bytes = states_of(plan).num_blocks * STATE
    assert num_bytes <= 128 * MIB < num_bytes + 4 * STATE
    assert plan.groups[0].num_blocks * 16 * PER_TOKEN > 128 * MIB


def test_a_model_without_attention_has_states_alone() -> None:
    facts = replace(OF_STATES, bytes_per_token=0)
    plan = plan_memory(facts, replace(FOR_EIGHT, kv_cache_memory=1 * GIB), []).kv_cache
    assert plan == KVCachePlan(16, (), states=StatesPlan(128, STATE))
    assert plan.concurrency(100_000) == 127


@pytest.mark.parametrize(
    ("groups", "wish", "count"),
    [
        (FULL, {"kv_cache_memory": 2 * GIB, "state_blocks": 100}, 100),
        (FULL, {"num_blocks": 50, "state_blocks": 9}, 9),
        ([], {"num_blocks": 50}, 50),  # without attention they are all that there is
        ([], {"num_blocks": 50, "state_blocks": 9}, 9),
    ],
    ids=str,
)
def test_the_number_of_blocks_can_be_set(groups: list[GroupPlan], wish: dict[str, int], count: int) -> None:
    facts = OF_STATES if groups else replace(OF_STATES, bytes_per_token=0)
    budget = plan_memory(facts, replace(FOR_EIGHT, **wish), groups)
    assert states_of(budget.kv_cache).num_blocks == count
    assert budget.kv_cache.total_bytes <= 2 * GIB
    if "state_blocks" in wish:
        assert any(line.why == f"{count} blocks of 8.00 MiB, --state-blocks" for line in budget.lines())


def test_a_setting_for_states_that_there_are_not_is_refused() -> None:
    with pytest.raises(ModelError, match="no recurrent layers: leave out --state-blocks"):
        plan_memory(replace(OF_STATES, state_bytes=0), replace(FOR_EIGHT, state_blocks=5), FULL)


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(KVCacheTooLarge, match=r"A KV cache of 10 \+ 33 blocks needs .* At most .* \+ 9 blocks fit"):
        plan_memory(replace(OF_STATES, total_bytes=4 * GIB + 160 * MIB), replace(FOR_EIGHT, num_blocks=10), FULL)
    with pytest.raises(ModelError, match=r"too small: at least 2 are needed .* 16\.38 MiB"):
        plan_memory(OF_STATES, replace(FOR_EIGHT, kv_cache_memory=MIB), FULL)


def test_the_log_has_a_line_for_each_group() -> None:
    plan = KVCachePlan.one_group(101, 16, PER_TOKEN, StatesPlan(33, STATE))
    assert plan.total_bytes == 101 * 16 * PER_TOKEN + 33 * STATE
    assert plan.describe(1600).splitlines() == [
        "KV cache: 282.94 MiB in 2 groups, blocks of 16 tokens; at 1,600 tokens per sequence 1.00 at once",
        "group 0 (full attention): 18.94 MiB, 100 blocks of 192.00 KiB",
        "group 1 (states): 264.00 MiB, 32 blocks of 8.00 MiB",
    ]


# -- outputs of an encoder


NEEDS = CrossPlan(0, bytes_per_token=1024, max_tokens=500)
INPUT = 32
"""Blocks of 16 for an input."""
BLOCK = 16 * 1024
"""Bytes."""
OF_ENCODERS = MemoryFacts("cpu", 100 * GIB, 0, 0, 0, bytes_per_token=1024)


def plan_with_encoder(**settings: int | None) -> MemoryBudget:
    return plan_memory(OF_ENCODERS, replace(MemorySettings(16), **settings), None, NEEDS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "decoder", "cross"),
    [
        pytest.param(
            {"kv_cache_memory": GIB, "max_num_seqs": 8},
            GIB // BLOCK - (8 * INPUT + 1),
            8 * INPUT + 1,
            id="each sequence has the longest input",
        ),
        pytest.param({"kv_cache_memory": 100 * INPUT * BLOCK}, 50 * INPUT - 1, 50 * INPUT + 1, id="at most half"),
        pytest.param({"kv_cache_memory": (INPUT + 6) * BLOCK}, 5, INPUT + 1, id="but one fits"),
        pytest.param({"num_blocks": 50, "max_num_seqs": 2}, 50, 2 * INPUT + 1, id="blocks are the decoder's"),
        pytest.param({"kv_cache_memory": GIB, "cross_blocks": 77}, GIB // BLOCK - 77, 77, id="the setting decides"),
    ],
)
def test_the_blocks_of_the_decoder_and_of_inputs(settings: dict[str, int], decoder: int, cross: int) -> None:
    kv_cache = plan_with_encoder(**settings).kv_cache
    assert (kv_cache.cross, kv_cache.cross_index) == (CrossPlan(cross, 1024, 500), 1)
    assert kv_cache.groups[0].num_blocks == decoder
    assert kv_cache.total_bytes == (decoder + cross) * BLOCK


def test_where_nothing_is_left_for_the_decoder_the_error_says_what_takes_it() -> None:
    with pytest.raises(KVCacheTooLarge, match=r"33 blocks for inputs of 500 tokens.*--max-encoder-tokens"):
        plan_with_encoder(kv_cache_memory=(INPUT + 2) * 16 * 1024)
    with pytest.raises(ModelError, match="A KV cache of 1 blocks is too small"):
        plan_with_encoder(num_blocks=5, cross_blocks=1)
    with pytest.raises(ModelError, match="has no encoder: leave out --cross-blocks"):
        plan_memory(OF_ENCODERS, MemorySettings(16, cross_blocks=77))


def test_the_budget_lists_the_group_and_where_its_size_comes_from() -> None:
    budget = plan_with_encoder(kv_cache_memory=GIB, max_num_seqs=8)
    (line,) = [line for line in budget.lines() if "encoder" in line.what]
    assert (line.what, line.num_bytes) == ("· group 1, encoder's outputs", (8 * INPUT + 1) * 16 * 1024)
    assert line.why.endswith("for 8 inputs of 500 tokens")
    assert "group 1 (encoder's outputs)" in budget.kv_cache.describe(100)
    assert "--cross-blocks" in "".join(map(str, plan_with_encoder(kv_cache_memory=GIB, cross_blocks=77).lines()))


@pytest.mark.parametrize("kind", ["t5", "t5gemma"])
def test_a_model_without_weights_needs_what_the_loaded_one_needs(kind: str, tmp_path: Path) -> None:
    loaded = make_subject(kind, tmp_path).loaded
    assert loaded.encoder is not None
    limit = loaded.encoder.max_tokens
    meta_model = build_meta_model(loaded.runtime.config, limit)
    assert cross_needs(meta_model.layers, torch.float32, limit) == cross_needs(
        loaded.runtime.layers, torch.float32, limit
    )
    assert group_needs(meta_model.layers, torch.float32) == group_needs(loaded.runtime.layers, torch.float32)
    assert meta_model.activation_bytes(torch.float32, 64, 8) > 0
    kv_cache = loaded.plan(MemorySettings(16, num_blocks=40)).kv_cache
    cache = loaded.runner(kv_cache).kv_cache
    allocated = sum(layer.k_cache.nbytes + layer.v_cache.nbytes for layer in cache.layers)
    assert allocated == kv_cache.total_bytes
    assert kv_bytes_per_token(loaded.runtime.layers, torch.float32) == kv_cache.bytes_per_token


def test_a_longer_encoder_needs_more_activations() -> None:
    config = default_seq2seq_config("t5")
    short, long = (build_meta_model(config, length).activation_bytes(torch.float32, 8, 8) for length in (16, 4096))
    assert long > 10 * short


def test_a_maximum_batch_runs_the_encoder_on_its_longest_input_once(tmp_path: Path) -> None:
    loaded = make_subject("t5", tmp_path).loaded
    cross = cross_needs(loaded.runtime.layers, torch.float32, 100)
    batches = MaximumBatches(64, 4, 128, 16, bytes_per_token=1, cross=cross)
    runner = loaded.runner(batches.plan())
    steps = [batches.prompts(), batches.late_chunk(), batches.decodes(32)]
    for step in steps:
        results = runner.execute(step)
        assert all(result.token is not None for result in results)
    brought = [[len(part.encoder.token_ids) for part in step.parts if part.encoder is not None] for step in steps]
    assert brought == [[100, 0, 0, 0], [0], [0, 0, 0, 0]]


def test_lengths_come_from_the_config_or_from_the_usual_training() -> None:
    bart, t5 = default_seq2seq_config("bart"), default_seq2seq_config("t5")
    assert (choose_max_model_len(bart, None), choose_max_encoder_tokens(bart, 64)) == (1024, 1024)
    assert (choose_max_model_len(t5, None), choose_max_encoder_tokens(t5, 64)) == (512, 512)
    assert choose_max_encoder_tokens(t5, 2048) == 2048
    assert (choose_max_encoder_tokens(bart, 64, 100), choose_max_encoder_tokens(t5, 64, 9999)) == (100, 9999)
    with pytest.raises(ModelError, match="--max-encoder-tokens 1025 is not within 1 … 1024"):
        choose_max_encoder_tokens(bart, 64, 1025)
    two = default_seq2seq_config("encoder-decoder")
    two.encoder.max_position_embeddings = 300
    assert (choose_max_model_len(two, None), choose_max_encoder_tokens(two, 64)) == (512, 300)
