"""The split of a KV cache between groups with and without a window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.worker_service.cache.groups.window import ring_blocks, span
from kvpool.worker_service.model.errors import KVCacheTooLarge, ModelError
from kvpool.worker_service.model.forward.kv_plan import KVCachePlan
from kvpool.worker_service.model.memory.plan import MemoryFacts, MemorySettings, plan_memory
from kvpool.worker_service.model.memory.split import GroupNeeds, Split

MIXED = [GroupNeeds(None, 1024), GroupNeeds(512, 5 * 1024)]
"""Five layers with a window for each one without."""
RING, SPAN = 65, 32
"""Of a window of 512 in blocks of 16, with chunks of 512."""
GiB = 1 << 30


def split(groups: list[GroupNeeds], *, max_num_seqs: int = 64, window_blocks: int | None = None) -> Split:
    return Split(groups, 16, max_num_seqs=max_num_seqs, max_num_batched_tokens=2048, window_blocks=window_blocks)


def blocks(plan: KVCachePlan) -> list[int]:
    return [group.num_blocks for group in plan.groups]


def test_the_figures_of_the_issue() -> None:
    assert (ring_blocks(512, 512, 16), ring_blocks(512, 1, 16), span(512, 16)) == (RING, SPAN + 1, SPAN)


def test_windows_get_what_their_sequences_need_and_the_rest_is_full_attention() -> None:
    full, window = blocks(split(MIXED).of_bytes(8 * GiB))
    assert window == 64 * (RING + 2 * SPAN) + 1
    assert full == (8 * GiB - window * 16 * 5 * 1024) // (16 * 1024)


def test_with_less_memory_windows_take_at_most_half_of_it() -> None:
    full, window = blocks(split(MIXED).of_bytes(GiB))
    num_sequences, rest = divmod(window - 1, RING + 2 * SPAN)
    assert (num_sequences, rest) == (50, 0)
    assert window * 16 * 5 * 1024 <= GiB // 2 < (window + RING + 2 * SPAN) * 16 * 5 * 1024
    assert full == (GiB - window * 16 * 5 * 1024) // (16 * 1024)


def test_with_little_memory_every_group_has_as_many_blocks() -> None:
    assert blocks(split(MIXED).of_bytes(100 * 16 * 6 * 1024)) == [100, 100]


def test_a_number_of_blocks_is_that_of_full_attention() -> None:
    assert blocks(split(MIXED).of_blocks(20_000)) == [20_000, 64 * (RING + 2 * SPAN) + 1]
    assert blocks(split(MIXED).of_blocks(500)) == [500, 500]
    assert blocks(split(MIXED, max_num_seqs=2).of_blocks(500)) == [500, 2 * (RING + 2 * SPAN) + 1]
    assert blocks(split([GroupNeeds(512, 1)]).of_blocks(500)) == [500]


def test_windows_alone_share_by_their_need() -> None:
    groups = [GroupNeeds(4096, 1024), GroupNeeds(512, 1024)]
    long, short = blocks(split(groups).of_bytes(GiB))
    # Chunks are as long as the larger window.
    needs = [ring_blocks(window, 2048, 16) + 2 * span(window, 16) for window in (4096, 512)]
    assert long / short == pytest.approx(needs[0] / needs[1], rel=1e-3)
    assert GiB - 2 * 16 * 1024 <= (long + short) * 16 * 1024 <= GiB


def test_blocks_of_windows_can_be_set() -> None:
    full, window = blocks(split(MIXED, window_blocks=300).of_bytes(GiB))
    assert window == 300
    assert full == (GiB - 300 * 16 * 5 * 1024) // (16 * 1024)
    assert blocks(split(MIXED, window_blocks=300).of_blocks(50)) == [50, 300]


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
    needs = [GroupNeeds(window, size) for window, size in groups]
    plan = split(needs, max_num_seqs=max_num_seqs).of_bytes(num_bytes, workspace)
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


def facts(total_bytes: int = 8 * GiB) -> MemoryFacts:
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
        plan_memory(facts(), MemorySettings(16, window_blocks=10), [GroupNeeds(None, 6 * 1024)])


def test_a_cache_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(KVCacheTooLarge, match=r"blocks fit \(--num-blocks (\d+)") as caught:
        plan_memory(facts(), MemorySettings(16, num_blocks=1 << 20), MIXED)
    fitting = int(str(caught.value).split("(--num-blocks ")[1].split(",")[0])
    assert plan_memory(facts(), MemorySettings(16, num_blocks=fitting), MIXED).kv_cache.total_bytes <= 8 * GiB
