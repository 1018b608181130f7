"""The worker of a walkthrough is honest: it names nothing that is not there, or that it could not replace."""

from __future__ import annotations

import pytest

from kvpool.cache_service.core.messages import Granted, GrantedTable, ReservedBlock
from kvpool.walkthrough import state, window
from kvpool.walkthrough.layouts import FULL_AND_STATE, FULL_AND_WINDOW
from kvpool.walkthrough.sequence import WorkerSequence
from kvpool.walkthrough.worker import UnexpectedAnswer, Worker


def test_without_a_reserve_nothing_is_named_in_the_middle_of_a_text() -> None:
    """A lost hit, not an error: the next prompt with this beginning finds nothing, and that after it neither."""
    worker = Worker(FULL_AND_STATE)
    worker.allocate("A", state._A)
    assert worker.allocate_too_early("B", state._B).position == 8
    worker.append("A", up_to=8)
    assert worker.window("A").entries == {}
    assert len(worker.window("A").scratch) == 2
    assert worker.allocate("B", state._B).num_cached_tokens == 0
    assert worker.check().violations == []


def test_a_boundary_that_comes_too_late_is_ignored() -> None:
    scratch = tuple(ReservedBlock(block, 1) for block in range(1, 6))
    granted = Granted((GrantedTable((1, 2, 3, 4, 5, 6), (1,) * 6), GrantedTable((), (), 0, scratch)), 0, (20,))
    sequence = WorkerSequence(FULL_AND_WINDOW, bytes(4 * 24), 1, granted)
    sequence.advance(b"", 16, [[], []])
    sequence.add_boundary(8)
    progress = sequence.advance(b"", None, [[], []])
    assert [entry.table_index for entry in progress.bound[1]] == [3, 4]


def test_an_answer_that_a_story_does_not_expect_is_named() -> None:
    worker = Worker(FULL_AND_WINDOW)
    worker.allocate("A", window._A)
    with pytest.raises(UnexpectedAnswer, match="was to be granted; the core answered Wait"):
        worker.allocate("B", window._B)
    with pytest.raises(UnexpectedAnswer, match="was to wait; the core answered Granted"):
        worker.allocate_too_early("C", "something else")
