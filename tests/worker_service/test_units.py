"""Units on the worker's side: the KV of an encoder's input is taken whole or not at all, and outlives sessions.

Who runs an encoder and who waits is in test_engine_with_encoder.py; what holds whatever happens is in test_cache_stories.py.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

import pytest

from kvpool.cache_service.core.restored import Case
from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache import events
from kvpool.worker_service.cache.groups.unit import UnitLedger
from kvpool.worker_service.cache.ledger import DisagreementError
from kvpool.worker_service.cache.sequence import CacheSequence
from kvpool.worker_service.cache.settings import CacheSettings
from tests.cache_groups import groups_of
from tests.worker_service.windowed import Worker

SIZE = 4
CROSS = 1
"""The group with cross attention."""


def root_of(text: str) -> common_pb2.Root:
    """Of sequences with this input of the encoder."""
    return common_pb2.Root(model_fingerprint="m", input_digest=sha256(text.encode()).digest())


INPUT, OTHER = root_of("an input"), root_of("another one")


def worker_with_units() -> Worker:
    """With a group of the decoder's KV and one with cross attention."""
    return Worker((33, 9), (), block_size=SIZE, cross_group=CROSS)


def begin(worker: Worker, name: str, root: common_pb2.Root = INPUT, count: int = 10, num_new: int = 4) -> CacheSequence:
    """A sequence with its tables, whose encoder has `count` tokens of input."""
    return worker.begin(name, [1], num_new, root=root, num_encoder_tokens=count)


def test_a_sequence_has_as_much_room_as_the_decoders_pool() -> None:
    settings = CacheSettings(block_size=SIZE, groups=groups_of((33, 5), unit=CROSS))
    assert (settings.capacity, settings.encoder_capacity) == (32, 4)
    assert CacheSettings().encoder_capacity == 0


def test_units_outlive_the_session() -> None:
    """Those of live sequences, those that nobody has, and those that are not computed, in the order of eviction."""
    worker = worker_with_units()
    for name, root in (("old", root_of("old")), ("new", root_of("new"))):
        sequence = begin(worker, name, root, count=4)
        worker.step(sequence)
        worker.end(sequence)
    live, filling = begin(worker, "a", count=8), begin(worker, "b", OTHER, count=8)
    worker.step(live)
    before = [worker.manager.sessions[0].pools[CROSS].state(block) for block in range(1, 9)]
    worker.lose_session()
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


def test_what_the_encoder_has_put_out_is_stated_with_the_free() -> None:
    worker = worker_with_units()
    sequence = begin(worker, "a", num_new=6)
    worker.compute(sequence, 1)
    worker.cache.free(sequence)
    worker.methods.clear()
    worker.call()
    assert worker.methods == ["Free"]
    assert begin(worker, "next").encoder_cached


# -- the guard: a manager that is wrong costs a session and never a text


def change(change_run: Callable[[common_pb2.BlockRun], object]) -> Callable[[cache_pb2.Granted], object]:
    """A lie about the blocks of the unit."""
    return lambda granted: change_run(granted.tables[CROSS])


def in_another_order(run: common_pb2.BlockRun) -> None:
    run.block_ids.reverse()
    run.generations.reverse()


LIES: dict[str, Callable[[cache_pb2.Granted], object]] = {
    "not all of it": change(lambda run: (run.block_ids.pop(), run.generations.pop())),
    "in another order": change(in_another_order),
    "of another grant": change(lambda run: run.generations.append(run.generations.pop() + 1)),
    "another block": change(lambda run: run.block_ids.append(run.block_ids.pop() + 4)),
    "as new": lambda granted: setattr(granted, "encoder_cached", False),
    "as cached": lambda granted: setattr(granted, "encoder_cached", True),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_unit_is_taken_whole_and_as_it_was_computed(lie: str) -> None:
    """And none by a worker without an encoder, which is told that one is cached."""
    worker = Worker((33,), (), block_size=SIZE)
    second = worker.sequence("b", [1], 4)
    if lie != "as cached":
        worker = worker_with_units()
        worker.step(begin(worker, "a"))
        second = worker.sequence("b", [1], 4, root=INPUT, num_encoder_tokens=10)
    worker.now += 1
    call = worker.next_call(second)
    response = worker.execute(call.request)
    LIES[lie](response.results[0].granted)
    worker.cache.on_reply(call, response, worker.now)
    (lost,) = [one for one in worker.cache.take_events() if isinstance(one, events.SessionLost)]
    assert "disagree" in lost.why


def ledger_with_a_unit() -> UnitLedger:
    """Blocks 1 and 2 hold an input of 8 tokens, block 3 was granted."""
    ledger = UnitLedger(9, CROSS)
    for block in (1, 2, 3):
        ledger.accept_grant(block, 5)
        ledger.use(block)
    ledger.complete_unit([1, 2], INPUT, 8, num_groups=2)
    return ledger


@pytest.mark.parametrize(
    ("blocks", "root", "count", "why"),
    [
        ([1, 2], OTHER, 8, "another encoder's input"),
        ([1, 2], INPUT, 7, "another encoder's input"),
        ([3], INPUT, 4, "its KV is not complete"),
    ],
)
def test_a_unit_is_a_hit_for_its_own_input_only(blocks: list[int], root: common_pb2.Root, count: int, why: str) -> None:
    with pytest.raises(DisagreementError, match=why):
        ledger_with_a_unit().accept_unit(blocks, [5] * len(blocks), root, count)


def test_a_block_of_a_unit_is_granted_when_none_of_it_is_used_and_then_all_is_forgotten() -> None:
    ledger = ledger_with_a_unit()
    ((unit, _),) = ledger.whole_contents()
    assert unit.tokens == b"", "the digest names the input, whose tokens are kept nowhere"
    ledger.drop(1)
    with pytest.raises(DisagreementError, match="uses block 2 of the same unit"):
        ledger.accept_grant(1, 6)
    ledger.drop(2)
    assert (ledger.num_idle, len(ledger.whole_contents())) == (2, 1)
    ledger.accept_grant(2, 6)
    assert (ledger.num_idle, ledger.whole_contents(), ledger.idle_blocks()) == (0, [], [])
    with pytest.raises(DisagreementError):
        ledger.accept_unit([1, 2], [5, 6], INPUT, 8)
