"""Where snapshots of a running state are kept, so that others can go on from there.

That each step begins with the right state, and each snapshot is the one that it is named for, is in test_cache_stories.py.
"""

from __future__ import annotations

import pytest

from tests.worker_service.windowed import Worker, state_of

SIZE, GRID = 4, 8


def worker(state_blocks: int = 20, *, chunk: int = 16, retention_interval: int = 0) -> Worker:
    return Worker(
        (60, state_blocks), (), block_size=SIZE, chunk=chunk, grid=GRID, retention_interval=retention_interval
    )


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
    one = worker(retention_interval=9)
    sequence = one.generate("a", range(6), [7] * 60)
    assert snapshot_lengths(one) == [16, 32, 48, 64]
    one.end(sequence)
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
    one.tell("a", boundary)
    while sequence.num_computed_tokens < 42:
        one.step(sequence)
    assert snapshot_lengths(one) == kept
    one.check()
