"""A running state that only its sequence writes, and snapshots of it where others can go on.

`Worker` keeps, for each block of the state, the tokens that it was computed from, and asserts in every step that the state before
it is that of exactly the tokens before it.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.cache_service.core.messages import Boundary, SequenceKey
from kvpool.v1 import common_pb2
from kvpool.worker_service.cache.entry import Entry
from kvpool.worker_service.cache.groups.group import StateUse
from kvpool.worker_service.cache.groups.state import RunningState
from kvpool.worker_service.cache.reserve import SpareBlock
from kvpool.worker_service.cache.sequence import CacheSequence
from tests.worker_service.windowed import Worker, state_of

SIZE, GRID = 4, 8


def worker(state_blocks: int = 20, *, chunk: int = 16, retention_interval: int = 0) -> Worker:
    return Worker(
        (60, state_blocks), (), block_size=SIZE, chunk=chunk, grid=GRID, retention_interval=retention_interval
    )


def compute_all(one: Worker, sequence: CacheSequence) -> None:
    while sequence.num_computed_tokens < len(sequence.tokens):
        one.step(sequence)
        if len(sequence.tokens) == sequence.max_tokens and sequence.num_computed_tokens == sequence.max_tokens - 1:
            return


def snapshot_lengths(one: Worker) -> list[int]:
    """Tokens before each snapshot that the manager has."""
    return sorted(map(len, one.snapshots().values()))


def tell(one: Worker, sequence_id: str, num_tokens: int) -> None:
    """The next heartbeat brings this boundary."""
    (session,) = one.manager.sessions
    session.downlink.push(Boundary(SequenceKey(sequence_id, 1, 0), num_tokens))
    request = one.cache.keep_alive(common_pb2.WorkerLoad())
    assert request is not None
    one.cache.on_keep_alive(session.number, one.execute(request))


# -- chunks


@pytest.mark.parametrize(
    ("prompt", "chunks"), [(5, [5]), (8, [8]), (9, [8, 1]), (30, [16, 8, 6]), (41, [16, 16, 8, 1])]
)
def test_chunks_end_on_the_grid_and_at_the_end_of_the_prompt_whatever_fits(prompt: int, chunks: list[int]) -> None:
    """At most sixteen tokens fit; the boundary of the prompt is the last place of the grid before its last token."""
    one = worker()
    sequence = one.begin("a", range(prompt), 2)
    found = []
    while sequence.num_computed_tokens < prompt:
        before = sequence.num_computed_tokens
        one.step(sequence)
        found.append(sequence.num_computed_tokens - before)
    assert found == chunks


def test_a_chunk_that_would_end_before_the_next_place_of_the_grid_is_none() -> None:
    one = worker()
    sequence = one.begin("a", range(30))
    assert [one.cache.chunk(sequence, most) for most in (0, 1, 7, 8, 15, 16, 100)] == [0, 0, 0, 8, 8, 16, 24]


# -- what is kept for others


def test_a_prompt_and_a_text_are_kept_where_they_end_on_the_grid() -> None:
    """Thirty tokens and an answer of ten: snapshots after 24 and, when the text has ended, after 32 (39 were computed)."""
    one = worker()
    sequence = one.generate("a", range(30), [7] * 10)
    assert snapshot_lengths(one) == [24]
    one.end(sequence)
    assert snapshot_lengths(one) == [24, 32]
    assert one.begin("b", [*range(30), 5, 5]).num_cached_tokens == 24
    assert one.begin("c", [*range(30), *[7] * 10, 5]).num_cached_tokens == 32
    one.check()


def test_a_hit_is_read_once_and_released_when_the_sequence_has_gone_on() -> None:
    one = worker()
    one.end(one.generate("a", range(30), [7]))
    (snapshot,) = one.snapshots()
    sequence = one.begin("b", [*range(30), 5])
    assert sequence.state_use(25).source == snapshot  # type: ignore[union-attr]
    one.step(sequence)
    assert state_of(sequence).named == {} or 5 in state_of(sequence).named
    one.step(sequence)
    pool = one.manager.sessions[0].pools[1]
    assert (pool.ref_count(snapshot), snapshot in one.snapshots()) == (0, True)
    one.check()


def test_two_prompts_go_on_from_one_snapshot_at_the_same_time() -> None:
    """Neither sees what the other has made of it."""
    one = worker()
    one.end(one.generate("a", range(30), [7]))
    left, right = one.begin("b", [*range(30), 5, 5]), one.begin("c", [*range(30), 6, 6, 6])
    assert (left.num_cached_tokens, right.num_cached_tokens) == (24, 24)
    one.launch(left)
    one.launch(right)
    one.finish(left)
    one.finish(right)
    for sequence in (left, right):
        one.end(sequence)
    one.check()


def test_a_text_is_kept_every_interval_rounded_up_to_the_grid() -> None:
    one = worker(retention_interval=9)
    sequence = one.generate("a", range(6), [7] * 60)
    assert snapshot_lengths(one) == [16, 32, 48, 64]
    one.end(sequence)
    one.check()


def test_a_new_round_begins_with_no_state_or_with_a_snapshot() -> None:
    """A block that had another state is no beginning."""
    one = worker(state_blocks=4)
    sequence = one.begin("a", range(7), 3)
    one.step(sequence)
    again = one.cache.preempt(sequence)
    one.call()
    one.call(again)
    assert again.state_use(7) == StateUse(0, state_of(again).running.block, 0)
    one.step(again)
    one.end(again)
    one.check()


def test_a_full_pool_loses_hits_and_no_step_waits() -> None:
    """A block for the running state and one for the copy, which is named: no other copy can be made."""
    one = worker(state_blocks=5)
    other = one.begin("b", range(50, 57), 2)
    sequence = one.generate("a", range(30), [7] * 30)
    one.end(other)
    assert one.cache.num_reserve_waits == 0
    one.end(sequence)
    one.check()


def test_a_prompt_that_finds_no_block_for_its_state_is_asked_for_once_in_a_while() -> None:
    """And not again and again because the reserve that was filled for it is given back."""
    one = worker(state_blocks=4)
    one.begin("b", range(50, 57), 2)
    waiting = one.sequence("a", range(30), 30)
    num_before = one.cache.num_calls
    one.call(waiting)
    assert one.cache.num_calls == num_before + 1


# -- told by the manager


@pytest.mark.parametrize(("boundary", "kept"), [(8, [40]), (16, [16, 40]), (24, [24, 40]), (32, [32, 40])])
def test_a_place_told_in_time_is_kept_and_one_told_too_late_is_not(boundary: int, kept: list[int]) -> None:
    """Sixteen tokens are computed: the copy of that state is there, that of eight is not any more."""
    one = worker()
    sequence = one.begin("a", range(42))
    one.step(sequence)
    assert sequence.num_computed_tokens == 16
    tell(one, "a", boundary)
    compute_all(one, sequence)
    one.call()
    assert snapshot_lengths(one) == kept
    one.check()


def test_a_place_told_while_the_step_to_it_runs_is_kept_after_the_step() -> None:
    one = worker()
    sequence = one.begin("a", range(42))
    one.launch(sequence)
    tell(one, "a", 16)
    one.call()
    assert one.snapshots() == {}
    one.finish(sequence)
    assert snapshot_lengths(one) == [16]
    one.check()


def test_a_place_told_while_the_step_after_it_runs_is_too_late_if_its_copy_is_replaced() -> None:
    one = worker()
    sequence = one.begin("a", range(42))
    one.step(sequence)
    one.launch(sequence)
    tell(one, "a", 16)
    one.finish(sequence)
    compute_all(one, sequence)
    assert snapshot_lengths(one) == [40]
    one.check()


# -- faults


def test_the_copy_of_a_step_that_failed_is_not_named() -> None:
    """It may hold anything."""
    one = worker()
    sequence = one.begin("a", range(42))
    one.launch(sequence)
    one.cache.fail_step([sequence])
    one.end(sequence)
    assert one.snapshots() == {}
    one.check()


def test_all_is_there_after_the_manager_has_lost_it() -> None:
    """The running state, its copy, a hit that is being read, and snapshots."""
    one = worker()
    one.end(one.generate("a", range(30), [7]))
    reader, writer = one.begin("b", [*range(30), 5, 5], 20), one.begin("c", range(100, 120), 20)
    one.step(writer)
    one.cache.lose("the manager was restarted")
    one.manager = type(one.manager)(2)
    one.register()
    one.check()
    for sequence in (reader, writer):
        while len(sequence.tokens) < sequence.max_tokens:
            one.step(sequence)
        one.end(sequence)
    assert one.begin("d", [*range(30), 5, 5, 1]).num_cached_tokens == 32 or one.snapshots()
    one.check()


def blocks(first: int, count: int) -> list[SpareBlock]:
    return [SpareBlock(block, 1) for block in range(first, first + count)]


@given(num_hits=st.integers(0, 3), scratch=st.integers(1, 3), draw=st.data())
def test_no_block_is_in_two_places_and_a_copy_is_what_it_is_named_for(
    num_hits: int, scratch: int, draw: st.DataObject
) -> None:
    """Whatever the chunks, and whatever is named."""
    hits = [Entry(2 * num_hits - 1, 900, 1)] if num_hits else []
    state = RunningState(2, SIZE, hits, blocks(1, scratch))
    computed = num_hits * GRID
    in_block: dict[int, int] = {900: computed}
    next_block = 100
    for _ in range(draw.draw(st.integers(1, 10))):
        end = computed + draw.draw(st.integers(1, 2 * GRID))
        count = min(state.num_useful(computed, end), draw.draw(st.integers(0, 1)))
        state.advance(computed, end, blocks(next_block, count))
        next_block += count
        use = state.state_use(computed, end)
        assert (in_block.get(use.source) == computed) if use.source else computed == 0
        named = {one.block for one in state.named.values()}
        assert use.running not in named | {use.snapshot}
        assert use.snapshot not in named
        in_block[use.running] = end
        if use.snapshot:
            in_block[use.snapshot] = end
        held = [*(one.block for one in state.named.values()), *(one.block for one in state.scratch())]
        assert len(held) == len(set(held))
        computed = end
        boundary = computed // SIZE
        if computed % GRID == 0 and state.has_window(boundary) and draw.draw(st.booleans()):
            assert state.num_to_replace(boundary, 100, is_prompt_done=False) == 0
            for entry in state.name(boundary):
                assert in_block[entry.block] == (entry.table_index + 1) * SIZE == computed
