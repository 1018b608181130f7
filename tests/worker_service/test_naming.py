"""Where a worker names windows, and keeps snapshots of a running state, so that others can go on from there.

That each window and snapshot holds what it is named for, and each step begins with the right state, is in test_cache_stories.py.
"""

from __future__ import annotations

import pytest

from kvpool.v1 import cache_pb2
from kvpool.worker_service.cache import boundaries
from kvpool.worker_service.cache.sequence import SequenceState
from tests.worker_service.windowed import Worker, ring_of, state_of

SIZE, WINDOW, SPAN, GRID = 4, 8, 2, 8


def worker(window_blocks: int = 20, chunk: int = 8) -> Worker:
    return Worker((40, window_blocks), (0, WINDOW), block_size=SIZE, chunk=chunk)


def contents(one: Worker) -> set[int]:
    """Blocks of the group with the window that hold something for others."""
    ledger = one.cache.state.ledgers[1]
    return {block for block in range(1, ledger.num_blocks) if ledger.content(block) is not None}


def test_only_the_windows_at_boundaries_hold_something_for_others() -> None:
    """A prompt of ten blocks and some tokens: its last two whole blocks, and later those at the end of the text."""
    one = worker()
    sequence = one.begin("a", range(42), 12)
    for _ in range(4):
        one.step(sequence)
    assert contents(one) == set()
    one.step(sequence)
    named = {index: reserved.block for index, reserved in ring_of(sequence).named.items()}
    assert (sorted(named), contents(one)) == ([8, 9], set(named.values()))
    while len(sequence.tokens) < 54:
        one.step(sequence)
    assert ring_of(sequence).named == {}
    assert contents(one) == set(named.values())
    one.end(sequence)
    assert len(contents(one)) == 2 * SPAN
    assert one.begin("b", range(42)).num_cached_tokens == 40
    assert one.begin("c", [*range(42), *[1] * 11, 7]).num_cached_tokens == 52
    one.check()


def test_a_long_text_is_flat_in_memory() -> None:
    """And no call is needed for its blocks with a window: the reserve stays empty."""
    one = worker(window_blocks=9, chunk=4)
    sequence = one.begin("a", range(6), 120)
    while len(sequence.tokens) < 126:
        one.step(sequence)
        assert sum(block > 0 for block in sequence.tables[1]) <= SPAN + 1
    assert one.held()[1] == SPAN + 1
    assert one.cache.num_reserve_waits == 0


def test_a_window_is_not_named_if_its_blocks_cannot_be_replaced() -> None:
    """The ring would be too small for the rest of the text. The reserve has had no room to fill."""
    one = worker(window_blocks=1 + 3 + 2, chunk=1)
    other = one.begin("b", range(50, 52), 2)
    sequence = one.begin("a", range(14), 40)
    while sequence.num_computed_tokens < 14:
        one.step(sequence)
    assert (one.cache.state.num_windows_named, one.cache.state.num_windows_not_named) == (0, 1)
    assert ring_of(sequence).named == {}
    one.end(other)
    while len(sequence.tokens) < 54:
        one.step(sequence)
    one.check()


def test_at_the_end_of_a_prompt_only_what_decoding_needs_is_replaced() -> None:
    """Which is less than a chunk of the prompt needs: the ring alone is enough, and the reserve, which is empty, is not needed."""
    one = worker(window_blocks=1 + 5 + 2)
    one.begin("b", range(50, 56), 2)
    sequence = one.begin("a", range(42), 20)
    assert len(ring_of(sequence).scratch()) == 5
    while sequence.num_computed_tokens < 42:
        one.step(sequence)
    assert sorted(ring_of(sequence).named) == [8, 9]


def test_the_end_of_a_text_is_no_boundary_and_needs_no_reserve() -> None:
    """The KV of the last token is never computed, and what a sequence has at its end nothing must replace."""
    one = Worker((40, 20), (0, WINDOW), block_size=SIZE, chunk=8, retention_interval=16)
    sequence = one.begin("a", range(18), 14)
    while sequence.num_computed_tokens < 26:
        one.step(sequence)
    assert sequence.max_tokens == 32
    assert boundaries.next_boundary(sequence, one.cache.settings) is None
    assert boundaries.num_lacking(sequence, ring_of(sequence), one.cache.settings) == 0


@pytest.mark.parametrize(("boundary", "named"), [(12, []), (16, [2, 3]), (20, [3, 4]), (24, [4, 5])])
def test_a_boundary_told_in_time_is_named_and_one_told_too_late_is_not(boundary: int, named: list[int]) -> None:
    """Sixteen tokens are computed: the window before them is whole, that before twelve may be written again by the next step."""
    one = worker()
    sequence = one.begin("a", range(41))
    one.step(sequence)
    one.step(sequence)
    assert sequence.num_computed_tokens == 16
    one.tell("a", boundary)
    one.call()
    one.step(sequence)
    assert sorted(ring_of(sequence).named) == named
    one.check()


def test_a_window_that_another_prompt_waits_for_is_stated_at_once() -> None:
    """Not with the next report of progress, which may be a while away. The ring has what is needed: nothing else is asked for."""
    one = worker()
    sequence = one.begin("a", range(24))
    one.step(sequence)
    one.step(sequence)
    assert one.cache.next_call(list, one.now) is None
    one.tell("a", 16)
    assert isinstance(one.next_call().request, cache_pb2.AppendRequest)


def test_a_boundary_told_during_a_step_is_named_after_it() -> None:
    one = worker()
    sequence = one.begin("a", range(41))
    one.launch(sequence)
    one.tell("a", 4)
    one.tell("a", 8, round_=1)
    one.tell("b", 8)
    one.call()
    one.finish(sequence)
    assert sorted(ring_of(sequence).named) == [0]


def test_a_boundary_that_is_told_with_the_grant_is_kept() -> None:
    """Two prompts in one call: the first is granted, and told in the same answer where the second parts from it."""
    one = worker()
    first, second = one.sequence("a", range(41)), one.sequence("b", [*range(8), 99, 98])
    one.call(first, second)
    assert first.state is SequenceState.LIVE
    assert second.state is SequenceState.PARKED
    assert first.boundaries == (8, 40)
    one.step(first)
    one.call(second)
    assert (second.state, second.num_cached_tokens) == (SequenceState.LIVE, 8)
    one.check()


def test_a_boundary_that_is_reached_but_not_named_is_not_reported_as_still_to_come() -> None:
    """The reserve cannot replace the window's blocks: it is tried again after the next step, of which the manager need not know."""
    one = worker(window_blocks=1 + 5 + 2)
    one.begin("b", range(50, 56), 2)
    sequence = one.begin("a", range(41))
    one.step(sequence)
    one.step(sequence)
    one.tell("a", sequence.num_computed_tokens)
    assert sequence.boundaries == (16, 40)
    one.lose_session()
    assert one.manager.sessions[0].sequences["a", 1].boundaries == (10,)
    one.check()


# -- snapshots of a running state


def with_state(state_blocks: int = 20, *, retention_interval: int = 0) -> Worker:
    return Worker((60, state_blocks), (), block_size=SIZE, chunk=16, grid=GRID, retention_interval=retention_interval)


def snapshots(one: Worker) -> dict[int, int]:
    """What the manager has as snapshots: by block, the number of tokens before it."""
    pool, found = one.manager.sessions[0].pools[-1], {}
    for block in range(1, pool.num_blocks):
        node, num_tokens = pool.node(block), 0
        while node is not None and node.parent is not None:
            node, num_tokens = node.parent, num_tokens + SIZE
        if num_tokens:
            found[block] = num_tokens
    return found


def snapshot_lengths(one: Worker) -> list[int]:
    """Tokens before each of them."""
    return sorted(snapshots(one).values())


# -- chunks


@pytest.mark.parametrize(
    ("prompt", "chunks"), [(5, [5]), (8, [8]), (9, [8, 1]), (30, [16, 8, 6]), (41, [16, 16, 8, 1])]
)
def test_chunks_end_on_the_grid_and_at_the_end_of_the_prompt_whatever_fits(prompt: int, chunks: list[int]) -> None:
    """At most sixteen tokens fit; the boundary of the prompt is the last place of the grid before its last token."""
    one = with_state()
    sequence = one.begin("a", range(prompt), 2)
    found = []
    while sequence.num_computed_tokens < prompt:
        before = sequence.num_computed_tokens
        one.step(sequence)
        found.append(sequence.num_computed_tokens - before)
    assert found == chunks


def test_a_chunk_that_would_end_before_the_next_place_of_the_grid_is_none() -> None:
    one = with_state()
    sequence = one.begin("a", range(30))
    assert [one.cache.chunk(sequence, most) for most in (0, 1, 7, 8, 15, 16, 100)] == [0, 0, 0, 8, 8, 16, 24]


# -- what is kept for others


def test_a_prompt_and_a_text_are_kept_where_they_end_on_the_grid() -> None:
    """Thirty tokens and an answer of ten: snapshots after 24 and, when the text has ended, after 32 (39 were computed)."""
    one = with_state()
    sequence = one.generate("a", range(30), [7] * 10)
    assert snapshot_lengths(one) == [24]
    one.end(sequence)
    assert snapshot_lengths(one) == [24, 32]
    assert one.begin("b", [*range(30), 5, 5]).num_cached_tokens == 24
    assert one.begin("c", [*range(30), *[7] * 10, 5]).num_cached_tokens == 32
    one.check()


def test_a_hit_is_read_once_and_released_when_the_sequence_has_gone_on() -> None:
    one = with_state()
    one.end(one.generate("a", range(30), [7]))
    (snapshot,) = snapshots(one)
    sequence = one.begin("b", [*range(30), 5])
    assert sequence.state_use(25).source == snapshot  # type: ignore[union-attr]
    one.step(sequence)
    assert state_of(sequence).named == {} or 5 in state_of(sequence).named
    one.step(sequence)
    pool = one.manager.sessions[0].pools[1]
    assert (pool.ref_count(snapshot), snapshot in snapshots(one)) == (0, True)
    one.check()


def test_a_text_is_kept_every_interval_rounded_up_to_the_grid() -> None:
    one = with_state(retention_interval=9)
    sequence = one.generate("a", range(6), [7] * 60)
    assert snapshot_lengths(one) == [16, 32, 48, 64]
    one.end(sequence)
    one.check()


def test_a_full_pool_loses_hits_and_no_step_waits() -> None:
    """A block for the running state and one for the copy, which is named: no other copy can be made."""
    one = with_state(state_blocks=5)
    other = one.begin("b", range(50, 57), 2)
    sequence = one.generate("a", range(30), [7] * 30)
    one.end(other)
    assert one.cache.num_reserve_waits == 0
    one.end(sequence)
    one.check()


def test_a_prompt_that_finds_no_block_for_its_state_is_asked_for_once_in_a_while() -> None:
    """And not again and again because the reserve that was filled for it is given back."""
    one = with_state(state_blocks=4)
    one.begin("b", range(50, 57), 2)
    waiting = one.sequence("a", range(30), 30)
    num_before = one.cache.num_calls
    one.call(waiting)
    assert one.cache.num_calls == num_before + 1


# -- told by the manager


@pytest.mark.parametrize(("boundary", "kept"), [(8, [40]), (16, [16, 40]), (24, [24, 40]), (32, [32, 40])])
def test_a_place_told_in_time_is_kept_and_one_told_too_late_is_not(boundary: int, kept: list[int]) -> None:
    """Sixteen tokens are computed: the copy of that state is there, that of eight is not any more."""
    one = with_state()
    sequence = one.begin("a", range(42))
    one.step(sequence)
    assert sequence.num_computed_tokens == 16
    one.tell("a", boundary)
    while sequence.num_computed_tokens < 42:
        one.step(sequence)
    assert snapshot_lengths(one) == kept
    one.check()
