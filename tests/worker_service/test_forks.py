"""Forks on a worker's cache side, over the manager's core: what is shared, what is copied, who waits for whom, and what is said."""

from __future__ import annotations

import pytest

from kvpool.cache_service.core.messages import Boundary, Limits, SequenceKey
from kvpool.v1 import common_pb2
from kvpool.worker_service.cache import events
from kvpool.worker_service.cache.engine_cache import Computed, ForkedSequence
from kvpool.worker_service.cache.entry import BlockCopy
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from tests.worker_service.windowed import Worker, ring_of

_FULL = ((64,), (0,))
_WINDOWED = ((64, 64), (0, 8))
_STATE = ((64, 16), (0, 0))


def _worker(
    layout: tuple[tuple[int, ...], tuple[int, ...]] = _FULL, *, state_grid: int = 0, limits: Limits | None = None
) -> Worker:
    return Worker(*layout, block_size=4, chunk=8, grid=state_grid, limits=limits)


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


def _step_unreported(worker: Worker, sequence: CacheSequence, num_computed_tokens: int) -> None:
    """Decode up to there, before any call to the manager is due."""
    while sequence.num_computed_tokens < num_computed_tokens:
        worker.launch(sequence)
        worker.cache.end_step([Computed(sequence, len(sequence.tokens), 7)], worker.now)


def _state(worker: Worker, sequence: CacheSequence) -> object:
    """What the manager knows of a sequence; None: nothing."""
    return worker.manager.sessions[0].sequences.get(sequence.id)


@pytest.mark.parametrize(("num_blocks", "num_made"), [(7, 0), (9, 1)])
def test_blocks_that_the_prompt_needed_go_to_the_forks_that_wait_for_them(num_blocks: int, num_made: int) -> None:
    """Beams wait for all of their forks: no step comes that would have the release stated, or make the copies of the first."""
    worker = Worker((num_blocks,), (5,), block_size=4, chunk=8, retention_interval=16)
    sequence = worker.sequence("a", range(25), 6)
    sequence.num_forks_to_come = num_made + 1
    worker.call(sequence)
    for num_computed_tokens in (8, 16, 24):
        worker.launch(sequence)
        worker.cache.end_step([Computed(sequence, num_computed_tokens, None)], worker.now)
        worker.call_now()
    worker.launch(sequence)
    worker.cache.end_step([Computed(sequence, 25, 7)], worker.now)
    for number in range(num_made):
        _fork(worker, sequence, f"fork-{number}")
    assert worker.cache.fork(sequence, "the last") is None
    worker.call_now()
    _fork(worker, sequence, "the last")


@pytest.mark.parametrize("num_tokens", [10, 12])
def test_a_fork_shares_full_blocks_and_gets_a_copy_of_the_tail(num_tokens: int) -> None:
    worker = _worker()
    parent = _decoding(worker, "p", num_tokens)
    child, copies = _fork(worker, parent, "c")
    assert (child.state, child.tokens, child.num_computed_tokens) == (SequenceState.LIVE, parent.tokens, num_tokens)
    num_shared = num_tokens // 4
    assert child.tables[0][:num_shared] == parent.tables[0][:num_shared]
    tails = zip(parent.tables[0][num_shared:], child.tables[0][num_shared:], strict=True)
    assert copies == tuple(BlockCopy(0, *tail) for tail in tails)
    assert len(copies) == (num_tokens % 4 > 0)
    assert not set(child.tables[0][num_shared:]) & set(parent.tables[0])


def test_a_fork_may_go_on_with_another_token() -> None:
    """One step's logits give the parent and its forks a token each."""
    worker = _worker()
    parent = _decoding(worker, "p", 10)
    forked = worker.cache.fork(parent, "c", num_tokens=10, max_new_tokens=3)
    assert forked is not None
    child = forked.sequence
    assert (child.tokens, child.max_tokens) == (parent.tokens[:10], 13)
    child.tokens.append(99)
    worker.step(child)
    assert (parent.tokens[10:], child.tokens[10:]) == ([1], [99, 1])


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


def test_the_manager_is_told_of_all_forks_in_one_call() -> None:
    worker = _worker()
    parent = _decoding(worker, "p", 10, num_forks=3)
    children = [_fork(worker, parent, name).sequence for name in "abc"]
    worker.methods.clear()
    for child in children:
        worker.cache.extend(child, len(child.tokens))
    worker.call()
    assert worker.methods.count("Fork") == 1
    assert worker.manager.sessions[0].counts()[0].shared == 2
    assert all(_state(worker, child) is not None and child.parent is None for child in children)
    worker.check()
    for sequence in (*children, parent):
        worker.step(sequence)
        worker.end(sequence)
    assert worker.held() == (0,)
    worker.check()


def test_a_fork_and_its_forks_are_told_together() -> None:
    worker = _worker()
    parent = _decoding(worker, "p", 10, num_forks=3)
    child, _ = _fork(worker, parent, "c")
    grandchild, _ = _fork(worker, child, "g")
    worker.methods.clear()
    worker.call()
    assert worker.methods.count("Fork") == 1
    assert (child.parent, grandchild.parent) == (None, None)


def test_a_fork_is_as_urgent_as_its_parent() -> None:
    worker = _worker()
    parent = _decoding(worker, "p", 10)
    parent.level = 3
    assert _fork(worker, parent, "c").sequence.level == 3


def test_eight_forks_hold_the_prompt_once_and_a_tail_each() -> None:
    worker = _worker()
    parent = _decoding(worker, "p", 42, num_new=2, num_forks=7)
    children = [_fork(worker, parent, f"c{index}").sequence for index in range(7)]
    for sequence in (parent, *children):
        worker.step(sequence)
    worker.call()
    assert worker.cache.num_used_blocks == (10 + 8,)
    assert worker.manager.sessions[0].counts()[0].held == 10 + 8


def test_a_parent_is_freed_only_when_its_forks_are_known() -> None:
    """What they share is pinned at the manager by the parent alone; and first it must know that it is computed."""
    worker = _worker()
    parent = _decoding(worker, "p", 10)
    _step_unreported(worker, parent, 12)
    child, copies = _fork(worker, parent, "c")
    assert not copies
    worker.cache.free(parent)
    worker.methods.clear()
    worker.call()
    assert worker.methods == ["Append", "Fork", "Free"]
    assert parent.state is SequenceState.ENDED
    assert _state(worker, child) is not None
    worker.check()
    worker.step(child)
    worker.end(child)
    assert worker.held() == (0,)


def test_blocks_that_are_copied_are_kept_until_the_step_has_ended() -> None:
    """The parent is freed at once, and the manager hears of the fork before the step that copies the tail."""
    worker = _worker()
    parent = _decoding(worker, "p", 10)
    child, _ = _fork(worker, parent, "c")
    worker.cache.free(parent)
    worker.call()
    assert (child.parent, parent.state) == (None, SequenceState.ENDING)
    worker.launch(child)
    worker.call()
    assert _states(parent) == [SequenceState.ENDING]
    worker.finish(child)
    assert _states(parent) == [SequenceState.ENDED]


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


def test_forks_that_end_before_they_are_stated_are_gone_together() -> None:
    """A fork waits for its own forks, and none of them for a call."""
    worker = _worker()
    parent = _decoding(worker, "p", 10, num_forks=3)
    spare = worker.cache.num_spare_blocks
    child, _ = _fork(worker, parent, "c")
    grandchild, _ = _fork(worker, child, "g")
    worker.cache.free(child)
    worker.cache.free(grandchild)
    assert _states(child, grandchild) == [SequenceState.ENDED, SequenceState.ENDED]
    assert worker.cache.num_spare_blocks == spare


def test_a_fork_that_ends_before_it_is_stated_costs_no_call() -> None:
    worker = _worker()
    parent = _decoding(worker, "p", 10)
    spare, used = worker.cache.num_spare_blocks, worker.cache.num_used_blocks
    child, _ = _fork(worker, parent, "c")
    worker.launch(child)
    worker.cache.free(child)
    assert _states(child) == [SequenceState.ENDING]
    worker.cache.fail_step([child])
    assert _states(child) == [SequenceState.ENDED]
    assert (worker.cache.num_spare_blocks, worker.cache.num_used_blocks) == (spare, used)
    worker.methods.clear()
    worker.end(parent)
    assert "Fork" not in worker.methods
    assert worker.held() == (0,)


def test_the_copies_of_a_fork_that_has_ended_hold_nobody_up() -> None:
    """No step may ever come to make them."""
    worker = _worker()
    parent = _decoding(worker, "p", 10)
    child, _ = _fork(worker, parent, "c")
    worker.cache.free(child)
    worker.end(parent)
    assert worker.held() == (0,)


def test_what_a_fork_has_completed_stays_as_cache_however_soon_it_ends() -> None:
    worker = _worker()
    parent = _decoding(worker, "p", 10)
    child, _ = _fork(worker, parent, "c")
    _step_unreported(worker, child, 13)
    worker.end(child)
    worker.end(parent)
    again = worker.begin("again", [*child.tokens[:12], 5])
    assert again.num_cached_tokens == 12


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
    _step_unreported(worker, last, 13)
    worker.end(last)
    worker.end(parent)
    assert worker.begin("again", [*last.tokens[:12], 5]).num_cached_tokens == 12


@pytest.mark.parametrize("first_to_end", ["p", "c", "g"])
@pytest.mark.parametrize("layout", [(_FULL, 0), (_WINDOWED, 0), (_STATE, 8)], ids=["full", "window", "state"])
def test_forks_of_forks_may_end_in_any_order(first_to_end: str, layout: tuple[object, int]) -> None:
    worker = _worker(layout[0], state_grid=layout[1])  # type: ignore[arg-type]
    parent = _decoding(worker, "p", 10, num_forks=3)
    child, _ = _fork(worker, parent, "c")
    grandchild, copies = _fork(worker, child, "g")
    assert {copy.source for copy in copies} <= {block for group in (0, 1) for block in _blocks(parent, group)}
    by_name = {"p": parent, "c": child, "g": grandchild}
    worker.cache.free(by_name.pop(first_to_end))
    for _ in range(4):
        for sequence in by_name.values():
            worker.step(sequence, 3)
            worker.check()
    for sequence in by_name.values():
        worker.end(sequence)
    assert sum(worker.held()) == 0
    worker.check()


def _blocks(sequence: CacheSequence, group: int) -> list[int]:
    return list(sequence.group_tables[group].blocks()) if group < len(sequence.tables) else []


def test_a_fork_has_a_ring_of_its_own() -> None:
    """It is a copy of the window, and however long the fork goes on it needs no more."""
    worker = _worker(_WINDOWED)
    parent = _decoding(worker, "p", 22, num_new=30)
    child, copies = _fork(worker, parent, "c")
    assert len(ring_of(child).scratch()) == ring_of(child).span + 1
    assert len([copy for copy in copies if copy.group == 1]) == 3
    assert not set(_blocks(child, 1)) & set(_blocks(parent, 1))
    most = 0
    for _ in range(25):
        worker.step(child, 2)
        most = max(most, len(ring_of(child).scratch()))
    assert most == ring_of(child).span + 1
    worker.check()


def test_the_ring_of_a_fork_keeps_the_window_at_the_last_place_of_the_grid() -> None:
    """The state can be kept only there, so that is where a conversation can go on from a fork."""
    worker = _worker(((64, 64, 16), (0, 8, 0)), state_grid=8)
    parent = _decoding(worker, "p", 14, num_new=40)
    child, _ = _fork(worker, parent, "c")
    while child.num_computed_tokens < 22:
        worker.step(child, 3)
    worker.end(child)
    assert worker.begin("again", child.tokens[:20]).num_cached_tokens == 16
    worker.check()


def test_a_window_is_named_only_when_it_was_copied_to_the_fork() -> None:
    """Another prompt may part from the fork's where the fork begins, and the manager ask for a window there before the step."""
    worker = _worker(_WINDOWED)
    parent = _decoding(worker, "p", 16)
    child, copies = _fork(worker, parent, "c")
    worker.call()
    (session,) = worker.manager.sessions
    session.downlink.push(Boundary(SequenceKey("c", 1, 0), 16))
    request = worker.cache.keep_alive(common_pb2.WorkerLoad())
    assert request is not None
    worker.cache.on_keep_alive(session.number, worker.execute(request))
    ledger = worker.cache._state.ledgers[1]
    assert [ledger.content(copy.target) for copy in copies] == [None, None]
    worker.step(child)
    assert sorted(ring_of(child).named) == [2, 3]
    worker.check()


def test_the_state_of_a_fork_is_copied_from_where_its_parent_has_it() -> None:
    """After a hit that is the snapshot, which others have too."""
    worker = _worker(_STATE, state_grid=8)
    first = _decoding(worker, "first", 17)
    worker.end(first)
    parent = worker.sequence("p", [*range(1, 17), 40], 9)
    parent.num_forks_to_come = 1
    worker.call(parent)
    assert parent.num_cached_tokens == 16
    use = parent.state_use(17)
    assert use is not None
    child, copies = _fork(worker, parent, "c")
    own = child.state_use(17)
    assert own is not None
    assert copies == (BlockCopy(1, use.source, own.running),)
    assert own.source == own.running
    worker.step(child)
    worker.step(parent)
    worker.check()


# -- the link


def _refused(worker: Worker, *, executed: bool) -> None:
    """The next call gets no answer."""
    call = worker.cache.next_call(list, worker.now + 10)
    assert call is not None
    assert type(call.request).__name__ == "ForkRequest"
    if executed:
        worker.execute(call.request)
    worker.cache.on_failure(call, "", worker.now)


@pytest.mark.parametrize("executed", [False, True])
def test_a_fork_is_stated_until_it_is_acknowledged(executed: bool) -> None:
    worker = _worker()
    parent = _decoding(worker, "p", 10)
    child, _ = _fork(worker, parent, "c")
    _refused(worker, executed=executed)
    worker.cache.free(parent)
    worker.step(child)
    assert child.parent is None
    assert parent.state is SequenceState.ENDED
    worker.check()
    worker.end(child)
    assert worker.held() == (0,)


@pytest.mark.parametrize("executed", [False, True])
def test_a_fork_whose_answer_was_lost_is_freed(executed: bool) -> None:
    """The manager may know of it."""
    worker = _worker()
    parent = _decoding(worker, "p", 10)
    child, _ = _fork(worker, parent, "c")
    _refused(worker, executed=executed)
    worker.cache.free(child)
    worker.end(parent)
    assert (parent.state, child.state) == (SequenceState.ENDED, SequenceState.ENDED)
    assert worker.held() == (0,)
    worker.check()


@pytest.mark.parametrize("is_in_step", [False, True])
@pytest.mark.parametrize("layout", [(_WINDOWED, 0), (_STATE, 8)], ids=["window", "state"])
def test_what_was_not_copied_to_a_fork_is_no_hit(layout: tuple[object, int], is_in_step: bool) -> None:
    """The fork ends before the step that makes its copies, or with that step, which fails. The manager may know of it by then, and
    its Free would keep the window or the state at its end for others."""
    worker = _worker(layout[0], state_grid=layout[1])  # type: ignore[arg-type]
    parent = _decoding(worker, "p", 16)
    child, copies = _fork(worker, parent, "c")
    assert copies
    _refused(worker, executed=True)
    if is_in_step:
        worker.launch(child)
        worker.cache.fail_step([child])
    worker.end(child)
    assert child.state is SequenceState.ENDED
    ledger = worker.cache._state.ledgers[1]
    assert [ledger.content(copy.target) for copy in copies] == [None] * len(copies)
    worker.check()


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("layout", [(_FULL, 0), (_WINDOWED, 0), (_STATE, 8)], ids=["full", "window", "state"])
def test_a_report_states_the_forks_that_were_known(is_known: bool, layout: tuple[object, int]) -> None:
    """Like other sequences: as tables that have blocks in common. The others are stated after it, as they would have been."""
    worker = _worker(layout[0], state_grid=layout[1])  # type: ignore[arg-type]
    parent = _decoding(worker, "p", 10)
    child, _ = _fork(worker, parent, "c")
    if is_known:
        worker.call()
    worker.cache.lose("the test says so")
    worker.methods.clear()
    worker.register()
    assert worker.methods.count("Fork") == (not is_known)
    assert worker.manager.sessions[0].counts()[0].shared == 2
    assert child.parent is None
    for sequence in (child, parent):
        worker.step(sequence)
        worker.check()
        worker.end(sequence)
    assert sum(worker.held()) == 0
    worker.check()


@pytest.mark.parametrize("is_known", [False, True])
def test_a_parent_that_ended_while_there_was_no_session_is_reported_for_its_forks_only(is_known: bool) -> None:
    """What they share is pinned by it until they are stated."""
    worker = _worker()
    parent = _decoding(worker, "p", 12)
    child, _ = _fork(worker, parent, "c")
    if is_known:
        worker.call()
    worker.cache.lose("the test says so")
    worker.cache.free(parent)
    worker.methods.clear()
    worker.register()
    assert [one for one in worker.methods if one != "Report"] == ([] if is_known else ["Fork", "Free"])
    assert [key[0] for key in worker.manager.sessions[0].sequences] == ["c"]
    worker.step(child)
    worker.end(child)
    assert worker.held() == (0,)


def test_a_fork_that_has_completed_blocks_is_stated_after_a_report() -> None:
    """In the report these blocks are of the reserve, which the manager has them in."""
    worker = _worker()
    parent = _decoding(worker, "p", 10)
    child, _ = _fork(worker, parent, "c")
    _step_unreported(worker, child, 14)
    worker.cache.lose("the test says so")
    worker.begin_report()
    worker.cache.free(child)
    worker.call()
    worker.check()
    worker.end(parent)
    assert worker.begin("again", [*child.tokens[:12], 5]).num_cached_tokens == 12


@pytest.mark.parametrize("who", ["p", "c"])
def test_a_preempted_parent_or_fork_comes_back_in_its_next_round(who: str) -> None:
    worker = _worker()
    parent = _decoding(worker, "p", 10)
    child, _ = _fork(worker, parent, "c")
    again = worker.cache.preempt(parent if who == "p" else child)
    other = child if who == "p" else parent
    worker.step(other)
    worker.call(again)
    assert (again.state, again.round) == (SequenceState.LIVE, 1)
    worker.check()
    for sequence in (again, other):
        worker.end(sequence)
    assert worker.held() == (0,)


def test_forks_of_a_superseded_sequence_are_stopped() -> None:
    """A larger attempt of the parent lives on another worker, so nothing more is taken in of this one."""
    worker = _worker()
    parent = _decoding(worker, "p", 10)
    child, _ = _fork(worker, parent, "c")
    grandchild, _ = _fork(worker, child, "g")
    worker.manager.sessions[0].sequences["p", 1].fenced = True
    worker.call()
    stopped = [event.sequence for event in worker.cache.take_events() if isinstance(event, events.Stopped)]
    assert stopped == [child, grandchild]
    worker.cache.free(parent)
    worker.call()
    assert parent.state is SequenceState.ENDING, "the forks still use its blocks"
    worker.cache.free(child)
    worker.end(grandchild)
    assert worker.held() == (0,)


def test_forks_that_were_not_stated_are_stopped_with_their_superseded_parent() -> None:
    """And theirs: the manager is told of none of them any more, so no answer of it would stop them."""
    worker = _worker()
    parent = _decoding(worker, "p", 10, num_forks=3)
    _step_unreported(worker, parent, 12)
    child, _ = _fork(worker, parent, "c")
    grandchild, _ = _fork(worker, child, "g")
    worker.manager.sessions[0].sequences["p", 1].fenced = True
    worker.methods.clear()
    worker.call()
    assert worker.methods == ["Append"]
    stopped = [event.sequence for event in worker.cache.take_events() if isinstance(event, events.Stopped)]
    assert set(stopped) >= {child, grandchild}


def test_a_fork_for_which_the_manager_has_no_room_goes_on() -> None:
    """Its parent gives its blocks back when the manager has heard of the fork, or when the fork has ended; nobody may wait for them
    before, or both would wait for each other."""
    worker = _worker(limits=Limits(max_sequences_per_session=1))
    parent = _decoding(worker, "p", 10, num_new=40)
    child, _ = _fork(worker, parent, "c")
    worker.cache.free(parent)
    for _ in range(3):
        worker.step(child)
    assert parent.state is SequenceState.ENDING
    worker.cache._state.pool_is_empty[0] = True
    worker.cache._state.reserves[0].give_up(len(worker.cache._state.reserves[0]))
    assert worker.cache.is_exhausted
    assert worker.cache.forks_hold_blocks
    worker.end(child)
    assert not worker.cache.forks_hold_blocks
    assert (child.state, parent.state) == (SequenceState.ENDED, SequenceState.ENDED)
    assert worker.held() == (0,)
    worker.check()
