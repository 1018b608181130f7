"""Forks on a worker's cache side, over the manager's core: what is shared, who waits for whom, and what costs a call.

What holds whatever happens to forks is in test_cache_stories.py, what a fork has in a group of each kind in test_group_kinds.py.
"""

from __future__ import annotations

import pytest

from kvpool.cache_service.core.messages import Limits
from kvpool.worker_service.cache.engine_cache import ForkedSequence
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from tests.worker_service.windowed import Worker, ring_of


def _worker(limits: Limits | None = None) -> Worker:
    return Worker((64,), (), block_size=4, chunk=8, limits=limits)


def _decoding(worker: Worker, name: str, num_tokens: int, *, num_new: int = 20, num_forks: int = 2) -> CacheSequence:
    """A sequence that has computed so many tokens of its prompt, and has one more; its forks can be made."""
    sequence = worker.sequence(name, range(1, 1 + num_tokens), num_new)
    sequence.num_forks_to_come = num_forks
    worker.call(sequence)
    while sequence.num_computed_tokens < num_tokens:
        worker.step(sequence)
    return sequence


def _fork(worker: Worker, parent: CacheSequence, name: str) -> ForkedSequence:
    forked = worker.cache.fork(parent, name)
    assert forked is not None
    return forked


def _states(*sequences: CacheSequence) -> list[SequenceState]:
    return [sequence.state for sequence in sequences]


@pytest.mark.parametrize(("num_blocks", "num_made"), [(7, 0), (9, 1)])
def test_blocks_that_the_prompt_needed_go_to_the_forks_that_wait_for_them(num_blocks: int, num_made: int) -> None:
    """Beams wait for all of their forks: no step comes that would have the release stated, or make the copies of the first."""
    worker = Worker((num_blocks,), (5,), block_size=4, chunk=8, retention_interval=16)
    sequence = worker.sequence("a", range(25), 6)
    sequence.num_forks_to_come = num_made + 1
    worker.call(sequence)
    for num_computed_tokens in (8, 16, 24):
        worker.compute(sequence, num_computed_tokens)
        worker.call_now()
    worker.compute(sequence, 25)
    for number in range(num_made):
        _fork(worker, sequence, f"fork-{number}")
    assert worker.cache.fork(sequence, "the last") is None
    worker.call_now()
    _fork(worker, sequence, "the last")


def test_a_fork_is_as_urgent_as_its_parent_and_may_go_on_with_another_token() -> None:
    """One step's logits give the parent and its forks a token each."""
    worker = _worker()
    parent = _decoding(worker, "p", 10)
    parent.level = 3
    forked = worker.cache.fork(parent, "c", num_tokens=10)
    assert forked is not None
    child = forked.sequence
    assert (child.tokens, child.max_tokens, child.level) == (parent.tokens[:10], parent.max_tokens, 3)


def test_no_fork_changes_anything_without_blocks_for_it() -> None:
    """The reserve is then filled for one, whoever forgot to say that it would come."""
    worker = _worker()
    parent = _decoding(worker, "p", 10, num_new=1, num_forks=0)
    assert worker.cache.num_spare_blocks == (0,)
    used = worker.cache.num_used_blocks
    assert worker.cache.fork(parent, "c") is None
    assert (worker.cache.num_used_blocks, worker.cache.is_exhausted) == (used, False)
    worker.call()
    assert worker.cache.fork(parent, "c") is not None


def test_a_name_that_an_earlier_fork_has_not_given_up_is_not_given_again() -> None:
    """A stream of n answers was cut off, and is asked for again before the blocks of its answers are free."""
    worker = _worker()
    parent = _decoding(worker, "p", 10, num_forks=2)
    child = _fork(worker, parent, "c").sequence
    worker.call()
    worker.launch(child)
    worker.cache.free(child)
    used = worker.cache.num_used_blocks
    assert worker.cache.fork(parent, "c") is None
    assert worker.cache.num_used_blocks == used
    worker.finish(child)
    again = _fork(worker, parent, "c").sequence
    assert again is not child
    worker.call()
    worker.check()


def test_forks_and_their_forks_are_stated_in_one_call() -> None:
    worker = _worker()
    parent = _decoding(worker, "p", 10, num_forks=3)
    children = [_fork(worker, parent, name).sequence for name in "ab"]
    children.append(_fork(worker, children[0], "c").sequence)
    worker.methods.clear()
    worker.call()
    assert worker.methods.count("Fork") == 1
    assert all(child.parent is None for child in children)
    assert worker.manager.sessions[0].counts()[0].shared == 2
    worker.check()


def test_what_a_forks_fork_copies_is_kept_though_the_fork_between_them_has_ended() -> None:
    """The tail is the parent's: what the fork between them was to get it was never given."""
    worker = _worker()
    parent = _decoding(worker, "p", 10, num_forks=3)
    child, _ = _fork(worker, parent, "c")
    grandchild, _ = _fork(worker, child, "g")
    worker.call()
    worker.cache.free(child)
    worker.cache.free(parent)
    worker.call()
    assert _states(parent, child) == [SequenceState.ENDING, SequenceState.ENDED]
    worker.step(grandchild)
    assert _states(parent) == [SequenceState.ENDED]
    worker.check()


def test_forks_that_end_before_they_are_stated_are_gone_together_and_cost_no_call() -> None:
    """A fork waits for its own forks and its step, and none of them for a call."""
    worker = _worker()
    parent = _decoding(worker, "p", 10, num_forks=3)
    spare, used = worker.cache.num_spare_blocks, worker.cache.num_used_blocks
    child, _ = _fork(worker, parent, "c")
    grandchild, _ = _fork(worker, child, "g")
    worker.launch(grandchild)
    worker.cache.free(child)
    worker.cache.free(grandchild)
    assert _states(child, grandchild) == [SequenceState.ENDING, SequenceState.ENDING]
    worker.cache.fail_step([grandchild])
    assert _states(child, grandchild) == [SequenceState.ENDED, SequenceState.ENDED]
    assert (worker.cache.num_spare_blocks, worker.cache.num_used_blocks) == (spare, used)
    worker.methods.clear()
    worker.end(parent)
    assert "Fork" not in worker.methods


def test_what_forks_have_completed_is_cache_again_once_the_manager_has_room() -> None:
    """While it has none a fork that ends is dropped, with what it has computed."""
    worker = _worker(limits=Limits(max_sequences_per_session=2))
    parent = _decoding(worker, "p", 10, num_forks=4)
    known, _ = _fork(worker, parent, "known")
    worker.call()
    late, _ = _fork(worker, parent, "late")
    worker.call()
    assert (known.parent, late.parent) == (None, parent)
    worker.end(known)
    worker.now += 10.0
    worker.call()
    assert late.parent is None
    worker.end(late)
    last, _ = _fork(worker, parent, "last")
    worker.compute(last, 13)
    worker.end(last)
    worker.end(parent)
    assert worker.begin("again", [*last.tokens[:12], 5]).num_cached_tokens == 12


def test_the_ring_of_a_fork_keeps_the_window_at_the_last_place_of_the_grid() -> None:
    """The state can be kept only there, so that is where a conversation can go on from a fork."""
    worker = Worker((64, 64, 16), (0, 8, 0), block_size=4, chunk=8, grid=8)
    parent = _decoding(worker, "p", 14, num_new=40)
    child, _ = _fork(worker, parent, "c")
    while child.num_computed_tokens < 22:
        worker.step(child, 3)
    worker.end(child)
    assert worker.begin("again", child.tokens[:20]).num_cached_tokens == 16
    worker.check()


def test_a_window_is_named_only_when_it_was_copied_to_the_fork() -> None:
    """Another prompt may part from the fork's where the fork begins, and the manager ask for a window there before the step."""
    worker = Worker((64, 64), (0, 8), block_size=4, chunk=8)
    parent = _decoding(worker, "p", 16)
    child, copies = _fork(worker, parent, "c")
    worker.call()
    worker.tell("c", 16)
    ledger = worker.cache.state.ledgers[1]
    assert [ledger.content(copy.target) for copy in copies] == [None, None]
    worker.step(child)
    assert sorted(ring_of(child).named) == [2, 3]
    worker.check()


@pytest.mark.parametrize("is_in_step", [False, True])
@pytest.mark.parametrize("grid", [0, 8], ids=["window", "state"])
def test_what_was_not_copied_to_a_fork_is_no_hit(grid: int, is_in_step: bool) -> None:
    """The manager knows of the fork, which ends before the step that makes its copies, or that step fails. Its Free would keep for
    others what is at its end."""
    worker = Worker((64, 64), (0, 0 if grid else 5), block_size=4, chunk=8, grid=grid)
    parent = _decoding(worker, "p", 16)
    child, copies = _fork(worker, parent, "c")
    assert copies
    worker.call()
    if is_in_step:
        worker.launch(child)
        worker.cache.fail_step([child])
    worker.end(child)
    ledger = worker.cache.state.ledgers[1]
    assert [ledger.content(copy.target) for copy in copies] == [None] * len(copies)
    worker.check()
