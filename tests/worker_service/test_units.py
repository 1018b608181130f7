"""Units on the worker's side: the KV of an encoder's input is computed once, shared, reported, and whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

import pytest

from kvpool.cache_service.core.messages import TOKEN_BYTES
from kvpool.cache_service.core.restored import Case
from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache import events
from kvpool.worker_service.cache.engine_cache import Computed
from kvpool.worker_service.cache.groups.unit import Unit, UnitLedger
from kvpool.worker_service.cache.ledger import DisagreementError
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from kvpool.worker_service.cache.settings import CacheSettings
from tests.cache_groups import groups_of
from tests.worker_service.windowed import Worker

SIZE = 4
FULL, CROSS = 0, 1


def root_of(text: str) -> common_pb2.Root:
    """Of sequences with this input of the encoder."""
    return common_pb2.Root(model_fingerprint="m", input_digest=sha256(text.encode()).digest())


INPUT, OTHER = root_of("an input"), root_of("another one")


def worker_with(num_unit_blocks: int = 9, num_blocks: int = 33) -> Worker:
    """With a group of the decoder's KV and one with cross attention."""
    return Worker((num_blocks, num_unit_blocks), (), block_size=SIZE, cross_group=CROSS)


def begin(worker: Worker, name: str, root: common_pb2.Root = INPUT, count: int = 10, num_new: int = 4) -> CacheSequence:
    """A sequence with its tables, whose encoder has `count` tokens of input."""
    return worker.begin(name, [1], num_new, root=root, num_encoder_tokens=count)


def test_the_step_that_computes_the_first_tokens_has_run_the_encoder() -> None:
    worker = worker_with()
    sequence = begin(worker, "a")
    assert (sequence.tables[CROSS], sequence.num_tokens_to_encode) == ([1, 2, 3], 10)
    worker.step(sequence)
    assert (sequence.encoder_computed, sequence.num_tokens_to_encode) == (True, 0)


def test_a_step_that_fails_has_not_run_the_encoder() -> None:
    worker = worker_with()
    sequence = begin(worker, "a")
    worker.launch(sequence)
    worker.cache.fail_step([sequence])
    assert sequence.num_tokens_to_encode == 10


def test_a_step_whose_logits_are_bad_has_not_run_the_encoder() -> None:
    """What led to them is perhaps in the encoder's KV: nobody else may get it."""
    worker = worker_with()
    sequence = begin(worker, "a")
    worker.launch(sequence)
    worker.cache.end_step([Computed(sequence, 0, None)], worker.now)
    assert not sequence.encoder_computed
    worker.end(sequence)
    assert not begin(worker, "b").encoder_cached


def test_the_next_sequence_with_the_input_gets_the_unit() -> None:
    worker = worker_with()
    first = begin(worker, "a")
    worker.step(first)
    second = begin(worker, "b")
    assert (second.tables[CROSS], second.encoder_cached, second.num_tokens_to_encode) == ([1, 2, 3], True, 0)
    worker.end(first)
    worker.end(second)
    assert begin(worker, "c").encoder_cached
    worker.check()


def test_a_second_sequence_waits_for_the_encoder_of_the_first() -> None:
    worker = worker_with()
    first, second = begin(worker, "a"), worker.sequence("b", [1], 4, root=INPUT, num_encoder_tokens=10)
    worker.call(second)
    assert (second.state, second.parked_position) == (SequenceState.PARKED, 0)
    worker.call(second)
    assert second.state is SequenceState.PARKED, "nothing was computed"
    worker.step(first)
    assert first.encoder_acked, "reported at once, because another sequence waits"
    worker.call(second)
    assert (second.state, second.encoder_cached) == (SequenceState.LIVE, True)


def test_a_sequence_goes_on_when_the_one_that_it_waits_for_ends() -> None:
    worker = worker_with()
    first, second = begin(worker, "a"), worker.sequence("b", [1], 4, root=INPUT, num_encoder_tokens=10)
    worker.call(second)
    worker.cache.free(first)
    worker.call(second)
    assert (second.state, second.encoder_cached) == (SequenceState.LIVE, False)


def test_a_sequence_runs_the_encoder_itself_if_its_leader_makes_no_progress() -> None:
    worker = worker_with()
    begin(worker, "a")
    second = worker.sequence("b", [1], 4, root=INPUT, num_encoder_tokens=10)
    worker.call(second)
    worker.now += 20
    worker.call(second)
    assert (second.state, second.encoder_cached) == (SequenceState.LIVE, False)


def test_different_inputs_share_nothing() -> None:
    worker = worker_with()
    worker.step(begin(worker, "a"))
    other = begin(worker, "b", OTHER)
    assert (other.encoder_cached, other.num_cached_tokens) == (False, 0)


def test_an_evicted_unit_is_computed_again_while_the_decoder_hits() -> None:
    worker = worker_with()
    first = begin(worker, "a", num_new=9)
    while len(first.tokens) < 9:
        worker.step(first, token=7)
    worker.step(first, token=7)
    worker.end(first)
    filler = begin(worker, "b", OTHER, count=32)
    worker.end(filler)
    again = worker.begin("c", first.tokens[:9], 2, root=INPUT, num_encoder_tokens=10)
    assert (again.num_cached_tokens, again.encoder_cached, again.num_tokens_to_encode) == (8, False, 10)
    worker.step(again)
    assert again.encoder_computed


def test_the_next_round_of_a_preempted_sequence_finds_its_unit() -> None:
    worker = worker_with()
    sequence = begin(worker, "a")
    worker.step(sequence)
    again = worker.cache.preempt(sequence)
    worker.call(again)
    assert (again.state, again.encoder_cached, again.num_encoder_tokens) == (SequenceState.LIVE, True, 10)


def test_the_reserve_has_no_blocks_for_units() -> None:
    """A unit is granted whole, and decoding needs no more of it."""
    worker = worker_with()
    sequence = begin(worker, "a", num_new=20)
    worker.step(sequence)
    assert worker.cache.num_spare_blocks[FULL] > 0
    assert worker.cache.num_spare_blocks[CROSS] == 0


def test_a_full_pool_of_units_lets_sequences_wait_and_preempts_nobody() -> None:
    worker = worker_with(num_unit_blocks=4)
    first = begin(worker, "a", count=12)
    worker.step(first)
    second = worker.sequence("b", [1], 4, root=OTHER, num_encoder_tokens=8)
    worker.call(second)
    assert (second.state, worker.cache.is_exhausted) == (SequenceState.WAITING, False)
    worker.end(first)
    worker.now += 2
    worker.call(second)
    assert second.state is SequenceState.LIVE


def test_a_sequence_has_as_much_room_as_the_decoders_pool() -> None:
    settings = CacheSettings(block_size=SIZE, groups=groups_of((33, 5), unit=CROSS))
    assert (settings.capacity, settings.encoder_capacity) == (32, 4)
    assert CacheSettings().encoder_capacity == 0


# -- reports


def test_units_outlive_the_session() -> None:
    """Those of live sequences, those that nobody has, and those that are not computed, in the order of eviction."""
    worker = worker_with()
    for name, root in (("old", root_of("old")), ("new", root_of("new"))):
        sequence = begin(worker, name, root, count=4)
        worker.step(sequence)
        worker.end(sequence)
    live, filling = begin(worker, "a", count=8), begin(worker, "b", OTHER, count=8)
    worker.step(live)
    before = [worker.manager.sessions[0].pools[CROSS].state(block) for block in range(1, 9)]
    worker.cache.lose("for the test")
    worker.register()
    worker.check()
    pool = worker.manager.sessions[0].pools[CROSS]
    assert [pool.state(block) for block in range(1, 9)] == before
    cases = worker.manager.reconciled
    assert (cases[Case.CACHED], cases[Case.HELD_SEALED], cases[Case.HELD_FILLING]) == (4, 2, 4)
    assert begin(worker, "c", count=8).encoder_cached
    worker.step(filling)
    worker.check()
    assert begin(worker, "d", OTHER, count=8).encoder_cached
    begin(worker, "e", root_of("yet another"), count=12)
    assert begin(worker, "f", root_of("new"), count=4).encoder_cached, "the older one was evicted"


def test_a_unit_of_ones_own_is_reported_as_a_duplicate() -> None:
    worker = worker_with()
    first = begin(worker, "a")
    second = worker.begin("b", [1], 4, root=INPUT, num_encoder_tokens=10, no_wait=True)
    worker.step(first)
    worker.step(second)
    for one in (first, second):
        assert one.encoder_acked
    worker.cache.lose("for the test")
    worker.register()
    worker.check()
    assert worker.manager.reconciled[Case.DUPLICATE] == 3
    worker.end(first)
    worker.end(second)
    worker.check()
    assert begin(worker, "c").encoder_cached


def test_an_encoder_that_ran_without_the_manager_is_stated_later() -> None:
    worker = worker_with()
    sequence = begin(worker, "a")
    worker.cache.lose("for the test")
    worker.step(sequence)
    worker.register()
    worker.check()
    assert sequence.encoder_acked
    assert begin(worker, "b").encoder_cached


def test_what_is_computed_while_the_report_is_on_its_way_is_stated_after_it() -> None:
    worker = worker_with()
    sequence = begin(worker, "a")
    worker.cache.lose("for the test")
    worker.begin_report()
    worker.launch(sequence)
    worker.cache.end_step([Computed(sequence, 1, 1)], worker.now)
    assert not sequence.encoder_acked
    worker.call()
    assert sequence.encoder_acked
    worker.check()


def test_an_append_whose_answer_is_lost_is_stated_again() -> None:
    worker = worker_with()
    sequence = begin(worker, "a")
    worker.launch(sequence)
    worker.cache.end_step([Computed(sequence, 1, 1)], worker.now)
    worker.now += 1
    call = worker.cache.next_call(list, worker.now)
    assert call is not None
    worker.execute(call.request)
    worker.cache.on_failure(call, "", worker.now)
    assert not sequence.encoder_acked
    worker.call()
    assert sequence.encoder_acked
    worker.check()


def test_a_free_states_that_the_encoder_has_run() -> None:
    worker = worker_with()
    sequence = begin(worker, "a")
    worker.launch(sequence)
    worker.cache.end_step([Computed(sequence, 1, 1)], worker.now)
    worker.end(sequence)
    assert begin(worker, "b").encoder_cached


# -- the guard: a manager that is wrong costs a session and never a text


def _half(granted: cache_pb2.Granted) -> None:
    del granted.tables[CROSS].block_ids[2:], granted.tables[CROSS].generations[2:]


def _in_another_order(granted: cache_pb2.Granted) -> None:
    run = granted.tables[CROSS]
    for field in (run.block_ids, run.generations):
        field[0], field[1] = field[1], field[0]


def _of_another_grant(granted: cache_pb2.Granted) -> None:
    granted.tables[CROSS].generations[1] += 1


def _another_block(granted: cache_pb2.Granted) -> None:
    granted.tables[CROSS].block_ids[1] = 7


def _as_new(granted: cache_pb2.Granted) -> None:
    granted.encoder_cached = False


LIES = [_half, _in_another_order, _of_another_grant, _another_block, _as_new]


@pytest.mark.parametrize("lie", LIES)
def test_a_unit_is_taken_whole_and_as_it_was_computed(lie: Callable[[cache_pb2.Granted], None]) -> None:
    worker = worker_with()
    worker.step(begin(worker, "a"))
    second = worker.sequence("b", [1], 4, root=INPUT, num_encoder_tokens=10)
    worker.now += 1
    call = worker.cache.next_call(lambda: [second], worker.now)
    assert call is not None
    response = worker.execute(call.request)
    lie(response.results[0].granted)
    worker.cache.on_reply(call, response, worker.now)
    (lost,) = [one for one in worker.cache.take_events() if isinstance(one, events.SessionLost)]
    assert "disagree" in lost.why


def test_a_unit_that_is_granted_as_it_was_computed_is_taken() -> None:
    """What the lies above are measured against."""
    worker = worker_with()
    worker.step(begin(worker, "a"))
    assert begin(worker, "b").encoder_cached


@pytest.mark.parametrize("what", ["root", "length"])
def test_a_unit_of_another_input_is_no_hit(what: str) -> None:
    ledger = ledger_with_a_unit()
    root, count = (OTHER, 8) if what == "root" else (INPUT, 7)
    with pytest.raises(DisagreementError, match="another encoder's input"):
        ledger.accept_unit([1, 2], [5, 5], root, count)


def ledger_with_a_unit() -> UnitLedger:
    """Blocks 1 and 2 hold an input of 8 tokens, block 3 was granted."""
    ledger = UnitLedger(9, CROSS)
    for block in (1, 2, 3):
        ledger.accept_grant(block, 5)
        ledger.use(block)
    ledger.complete_unit([1, 2], INPUT, 8, num_groups=2)
    return ledger


def test_a_block_of_a_unit_is_not_granted_while_any_of_it_is_used() -> None:
    ledger = ledger_with_a_unit()
    ledger.drop(1)
    with pytest.raises(DisagreementError, match="uses block 2 of the same unit"):
        ledger.accept_grant(1, 6)


def test_a_unit_is_forgotten_when_one_of_its_blocks_is_granted() -> None:
    ledger = ledger_with_a_unit()
    ledger.drop(1)
    ledger.drop(2)
    assert (ledger.num_idle, len(ledger.whole_contents())) == (2, 1)
    ledger.accept_grant(2, 6)
    assert (ledger.num_idle, ledger.whole_contents(), ledger.idle_blocks()) == (0, [], [])
    with pytest.raises(DisagreementError):
        ledger.accept_unit([1, 2], [5, 6], INPUT, 8)


def test_blocks_that_hold_no_unit_are_no_hit() -> None:
    ledger = ledger_with_a_unit()
    with pytest.raises(DisagreementError, match="its KV is not complete"):
        ledger.accept_unit([3], [5], INPUT, 4)


def test_a_worker_without_an_encoder_takes_no_unit() -> None:
    plain = Worker((33,), (), block_size=SIZE)
    sequence = plain.sequence("a", [1])
    plain.now += 1
    call = plain.cache.next_call(lambda: [sequence], plain.now)
    assert call is not None
    response = plain.execute(call.request)
    response.results[0].granted.encoder_cached = True
    plain.cache.on_reply(call, response, plain.now)
    assert any(isinstance(one, events.SessionLost) for one in plain.cache.take_events())


def test_a_unit_is_no_tokens_of_a_chain() -> None:
    """The digest names the input: its tokens are kept nowhere in the cache."""
    ((unit, _),) = ledger_with_a_unit().whole_contents()
    assert isinstance(unit, Unit)
    assert (unit.tokens, unit.num_tokens * TOKEN_BYTES) == (b"", 32)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_fork_shares_the_unit_of_its_parent(is_lost: bool) -> None:
    """It is stated after what the encoder has put out, also where a session was lost in between."""
    worker = worker_with()
    parent = begin(worker, "p", num_new=6)
    parent.num_forks_to_come = 1
    worker.step(parent)
    forked = worker.cache.fork(parent, "c")
    assert forked is not None
    child = forked.sequence
    assert child.unit_table == parent.unit_table
    assert all(copy.group != CROSS for copy in forked.copies)
    if is_lost:
        worker.cache.lose("the test says so")
        worker.register()
    worker.cache.free(parent)
    worker.step(child)
    worker.check()
    assert (child.parent, child.num_tokens_to_encode) == (None, 0)
    worker.end(child)
    worker.check()
    assert worker.held() == (0, 0)


def test_a_fork_is_stated_after_what_the_encoder_has_put_out() -> None:
    """Also where the fork shares no block of tokens, which would have to be stated before."""
    worker = worker_with()
    parent = begin(worker, "p", num_new=6)
    parent.num_forks_to_come = 1
    worker.call()
    worker.launch(parent)
    worker.cache.end_step([Computed(parent, 1, 7)], worker.now)
    forked = worker.cache.fork(parent, "c")
    assert forked is not None
    worker.cache.free(parent)
    worker.methods.clear()
    worker.step(forked.sequence)
    assert worker.methods == ["Append", "Fork", "Free"]
    assert forked.sequence.parent is None
