"""A ring turns only what no step sees any more, and never lacks a block."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.worker_service.cache.entry import Entry
from kvpool.worker_service.cache.groups.window import Ring, largest_chunk, ring_blocks, span
from kvpool.worker_service.cache.reserve import SpareBlock

SIZE = 4
Draw = st.DataObject


def blocks(first: int, count: int) -> list[SpareBlock]:
    return [SpareBlock(block, 1) for block in range(first, first + count)]


def hits(first_index: int, count: int) -> list[Entry]:
    return [Entry(first_index + offset, 900 + offset, 1) for offset in range(count)]


def check(ring: Ring, window: int, num_computed: int, end: int) -> None:
    """A step computes positions num_computed … end − 1: what it reads and writes is there, and each block is in one place."""
    first_seen = max(0, num_computed - window + 1)
    needed = ring.table[first_seen // SIZE : -(-end // SIZE)]
    assert 0 not in needed
    assert len(needed) == -(-end // SIZE) - first_seen // SIZE
    written = ring.table[num_computed // SIZE : -(-end // SIZE)]
    assert all(block not in {one.block for one in ring.named.values()} for block in written), "a named block is written"
    places = Counter(
        [one.block for one in (*ring.named.values(), *ring.placed.values(), *ring.free)]
        + [entry.block for entry in ring._released]
    )
    assert set(places.values()) == {1}
    live = {**ring.named, **ring.placed}
    assert {index: block for index, block in enumerate(ring.table) if block} == {
        index: one.block for index, one in live.items()
    }


@given(
    window=st.integers(2, 40),
    num_hits=st.integers(0, 12),
    max_chunk=st.integers(1, 40),
    grid=st.sampled_from([1, 1, 2, 3]),
    draw=st.data(),
)
def test_a_ring_has_what_every_step_needs(window: int, num_hits: int, max_chunk: int, grid: int, draw: Draw) -> None:
    """Whatever the chunks, where they begin, and which windows are named: with no block but those of the ring and replacements."""
    of_span = span(window, SIZE)
    num_hits -= num_hits % grid
    num_entries = min(num_hits, of_span)
    size = ring_blocks(window, max_chunk, SIZE, grid)
    scratch = blocks(1, size)
    ring = Ring(of_span, SIZE, hits(num_hits - num_entries, num_entries), scratch, size=size, grid_blocks=grid)
    num_computed, next_block = num_hits * SIZE, 100
    for _ in range(draw.draw(st.integers(1, 12))):
        end = num_computed + draw.draw(st.integers(1, max_chunk))
        assert ring.num_missing(num_computed, end) == 0
        ring.advance(num_computed, end)
        check(ring, window, num_computed, end)
        first, num_computed = num_computed, end
        for boundary in range(first // SIZE // grid * grid, num_computed // SIZE + 1, grid):
            if draw.draw(st.booleans()):
                assert ring.has_window(boundary), "the window was turned before it could be named"
                count = ring.num_to_replace(boundary, len(scratch), is_prompt_done=False)
                ring.name(boundary, blocks(next_block, count))
                next_block += count
                assert all(index in ring.named for index in ring.window(boundary))
                assert len(ring.scratch()) <= size, "more was replaced than was lost"
        check(ring, window, num_computed, num_computed)


@pytest.mark.parametrize(("window", "chunk"), [(512, 512), (17, 16), (8, 7), (2, 1)])
def test_a_ring_is_as_large_as_a_step_needs_and_no_larger(window: int, chunk: int) -> None:
    def most_missing(num_blocks: int) -> int:
        """Of a chunk that begins anywhere in a text that was computed token by token."""
        ring = Ring(span(window, SIZE), SIZE, [], blocks(1, num_blocks))
        missing = []
        for start in range(2 * window + 2 * SIZE):
            missing.append(ring.num_missing(start, start + chunk))
            if ring.num_missing(start, start + 1):
                break
            ring.advance(start, start + 1)
        return max(missing)

    size = ring_blocks(window, chunk, SIZE)
    assert most_missing(size) == 0
    assert most_missing(size - 1) == 1


def test_a_block_that_is_copied_is_released_after_the_copy() -> None:
    """Another sequence could be granted it in the answer to the call that says so, and write to it."""
    ring = Ring(1, SIZE, [], blocks(1, 4))
    ring.advance(0, SIZE)
    (named,) = ring.name(1)
    ring.advance(SIZE, 2 * SIZE)
    ring.advance(2 * SIZE, 3 * SIZE)
    statement, dropped = ring.state({named.block})
    assert (statement.bound, statement.released, dropped) == ((named,), (), [])
    ring.acknowledge(statement)
    assert not ring.has_to_release({named.block})
    assert ring.has_to_release(())
    statement, dropped = ring.state()
    assert (statement.released, dropped) == ((named,), [named.block])


def test_chunks_are_about_a_window_long() -> None:
    assert largest_chunk([512, 4096], 2048) == 2048
    assert largest_chunk([1024], 2048) == 1024
    assert largest_chunk([128], 2048) == 512
    assert largest_chunk([128], 100) == 100
