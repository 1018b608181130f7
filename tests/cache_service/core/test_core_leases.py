"""Sessions: leases give liveness, stamps give safety. Time is passed in; the manager reads no clock."""

from __future__ import annotations

import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import AllocateItem, Limits, Uplink, WorkerLoad
from kvpool.cache_service.core.refusal import Reason, Refusal
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import key, refused, registration, snapshot, successor, token_bytes

LEASE = 6.0
TICK = 0.5


class Clockwork:
    """A manager that is ticked every half second."""

    def __init__(self) -> None:
        self.manager = CacheManager(1, lease_seconds=LEASE, tick_seconds=TICK)
        self.now = 100.0
        self.manager.tick(self.now)

    def register(self, worker_id: str = "w1", *, incarnation: int = 1, register_no: int = 1, replaces: int = 0) -> int:
        """Begin a session. `replaces`: the incarnation of a process that has ended, as this one proves."""
        introduction = registration(worker_id, incarnation=incarnation, register_no=register_no)
        if replaces:
            earlier = registration(worker_id, incarnation=replaces)
            introduction = introduction._replace(predecessor_key=earlier.process_key)
        return self.manager.register(introduction, self.now).session

    def refused(self, *, incarnation: int, **more: int) -> Refusal:
        """The refusal of a Register, which has changed nothing."""
        before = snapshot(self.manager)
        refusal = refused(self.register, incarnation=incarnation, **more)
        assert snapshot(self.manager) == before
        return refusal

    def run(self, seconds: float) -> list[str]:
        """Tick as planned; returns the workers that expired."""
        expired = []
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            expired += [session.worker_id for session in self.manager.tick(self.now)]
        return expired

    def stall(self, seconds: float) -> list[str]:
        """The manager stands still, then ticks once."""
        self.now += seconds
        return [session.worker_id for session in self.manager.tick(self.now)]

    def keep_alive(self, session: int, answer_ack: int | None = None) -> int:
        """A KeepAlive is read; returns the number of its answer."""
        return self.manager.keep_alive(session, 0, WorkerLoad(), self.now, answer_ack=answer_ack).heartbeat_no

    @property
    def live(self) -> list[str]:
        """Workers with a session."""
        return [session.worker_id for session in self.manager.sessions]


def test_a_worker_that_stops_renewing_is_fenced() -> None:
    clock = Clockwork()
    silent, alive = clock.register("silent"), clock.register("alive")
    assert clock.run(LEASE - TICK) == []
    clock.keep_alive(alive)
    assert clock.run(TICK) == ["silent"]
    assert clock.live == ["alive"]
    item = AllocateItem(key("s"), ROOT, token_bytes([1]))
    for call_no in (1, 2):
        refusal = refused(clock.manager.allocate, Uplink(silent, call_no), [item])
        assert refusal.reason is Reason.STALE_SESSION
        assert "register again" in refusal.message
    refused(clock.keep_alive, silent)


@pytest.mark.parametrize("num_heard", [None, 0, 1, 5], ids=lambda count: f"heard={count}")
def test_a_worker_that_hears_no_answer_loses_its_lease_although_its_heartbeats_arrive(num_heard: int | None) -> None:
    """It could not work, and clients would be sent to it. None: it hears all."""
    clock = Clockwork()
    session, heard = clock.register("deaf"), 0
    for second in range(20):
        answer = clock.keep_alive(session, heard)
        assert answer == second + 1
        if num_heard is None or answer <= num_heard:
            heard = answer
        if clock.run(1.0):
            assert num_heard is not None
            assert second + 1 == num_heard + LEASE
            return
    assert num_heard is None


@pytest.mark.parametrize("acks", [(0, 0, 0, 0, 0), (None,) * 5, (0, 1, 1, 0, 1)], ids=["deaf", "no field", "late"])
def test_a_heartbeat_renews_if_it_acknowledges_something_new_or_has_no_such_field(acks: tuple[int | None, ...]) -> None:
    """One that arrives late acknowledges nothing new, nor does a copy. An engine that knows no acknowledgement renews with each."""
    clock = Clockwork()
    session = clock.register()
    newest = -1
    for ack in acks:
        clock.run(TICK)
        end = clock.manager.sessions[0].lease_end
        clock.keep_alive(session, ack)
        renews = ack is None or ack > newest
        assert clock.manager.sessions[0].lease_end == (clock.now + LEASE if renews else end)
        newest = max(newest, ack or 0)


def test_an_answer_that_was_not_sent_is_not_acknowledged() -> None:
    """It would count as news until as many heartbeats have come."""
    clock = Clockwork()
    session = clock.register()
    assert clock.keep_alive(session, 0) == 1
    end = clock.manager.sessions[0].lease_end
    clock.run(TICK)
    refusal = refused(clock.keep_alive, session, 2)
    assert (refusal.reason, refusal.field) == (Reason.BAD_FIELD, "answer_ack")
    assert "at most 1" in refusal.message
    assert clock.manager.sessions[0].lease_end == end


def test_the_dead_are_found_whoever_has_registered_before_and_behind_them() -> None:
    clock = Clockwork()
    sessions = {name: clock.register(name) for name in ("a", "b", "c", "d", "e")}
    clock.run(LEASE - TICK)
    for name in ("a", "c", "e"):
        clock.keep_alive(sessions[name])
    assert clock.run(TICK) == ["b", "d"]
    assert clock.live == ["a", "c", "e"]


def test_a_stalled_manager_expires_nobody() -> None:
    """A gap between ticks is time in which the manager stood still: every lease is that much longer."""
    clock = Clockwork()
    clock.register("fresh")
    assert clock.run(LEASE - 3 * TICK) == []
    assert clock.stall(1000.0) == [], "KeepAlives may be waiting to be read"
    assert clock.run(TICK) == ["fresh"], "what was left of the lease is left, no more"


@pytest.mark.parametrize("order", ["read before the tick", "read after the tick"])
def test_a_stall_makes_no_lease_longer_than_a_lease(order: str) -> None:
    """A KeepAlive read between the stall and the tick renews once; a worker that then dies is found as soon as any other."""
    clock = Clockwork()
    session = clock.register()
    clock.now += 1000.0
    if order == "read before the tick":
        clock.keep_alive(session)
    assert clock.manager.tick(clock.now) == []
    if order == "read after the tick":
        clock.keep_alive(session)
    assert clock.run(LEASE - TICK) == []
    assert clock.run(TICK) == ["w1"]


def test_registering_again_fences_the_earlier_session_whose_last_calls_do_nothing() -> None:
    """One session per worker, whichever of two processes has the earlier one."""
    clock = Clockwork()
    first = clock.register()
    second = clock.register(register_no=2)
    third = clock.register(incarnation=2, replaces=1)
    assert first < second < third
    for stale in (first, second):
        assert refused(clock.keep_alive, stale).reason is Reason.STALE_SESSION
        clock.manager.deregister(stale)
    clock.keep_alive(third)
    assert clock.live == ["w1"]


def test_of_two_processes_the_first_stays_while_it_lives() -> None:
    """A newer one that cannot show that it replaces the first is refused, whatever key it makes up, and told when to ask again."""
    clock = Clockwork()
    first = clock.register(incarnation=5)
    for seconds in (0.0, 4.0):
        clock.run(seconds)
        for replaces in (0, 4, 6):
            refusal = clock.refused(incarnation=(1 << 64) - 1, replaces=replaces)
            assert refusal.reason is Reason.WORKER_ELSEWHERE
            assert refusal.retry_seconds == LEASE - seconds
            assert "--worker-id" in refusal.message
    clock.keep_alive(first)
    clock.run(LEASE - TICK)
    assert clock.refused(incarnation=6).reason is Reason.WORKER_ELSEWHERE
    clock.run(TICK)
    clock.register(incarnation=6)


def test_without_a_process_key_nobody_proves_anything() -> None:
    """An engine of another make that names no key: an empty predecessor_key is not the key of an empty one."""
    manager = CacheManager(1, lease_seconds=LEASE)
    manager.register(registration()._replace(process_key=b""), 0.0)
    other = registration(incarnation=2)._replace(process_key=b"")
    assert refused(manager.register, other, 0.0).reason is Reason.WORKER_ELSEWHERE
    manager.register(registration(register_no=2)._replace(process_key=b""), 0.0)


def test_another_process_with_the_same_incarnation_is_another_process() -> None:
    """Whoever reads an incarnation in Describe cannot speak for its process, not even with the largest register_no."""
    clock = Clockwork()
    clock.register(incarnation=5)
    stranger = registration(incarnation=5, register_no=(1 << 64) - 1)._replace(process_key=b"another")
    assert refused(clock.manager.register, stranger, clock.now).reason is Reason.STALE_INCARNATION
    clock.register(incarnation=5, register_no=2)


@pytest.mark.parametrize("how", ["expired", "deregistered"])
def test_an_older_incarnation_is_accepted_a_lease_after_the_end_of_the_newer(how: str) -> None:
    """The largest incarnation there is does not lock a worker out: 2**64 - 1 was made up, or the clock was set back."""
    clock = Clockwork()
    newer = clock.register(incarnation=(1 << 64) - 1)
    refusal = clock.refused(incarnation=7)
    assert refusal.reason is Reason.STALE_INCARNATION
    assert refusal.retry_seconds == 2 * LEASE
    assert refusal.metadata == {"incarnation": str((1 << 64) - 1)}
    assert "restart the manager" in refusal.message
    if how == "expired":
        assert clock.run(LEASE) == ["w1"]
    else:
        clock.run(TICK)
        clock.manager.deregister(newer)
    while clock.now < 100.0 + 2 * LEASE:
        refusal = clock.refused(incarnation=7)
        assert refusal.reason is Reason.STALE_INCARNATION
        assert refusal.retry_seconds == 100.0 + 2 * LEASE - clock.now
        clock.run(TICK)
    clock.register(incarnation=7)
    assert clock.refused(incarnation=(1 << 64) - 1, replaces=6).reason is Reason.WORKER_ELSEWHERE


def test_a_manager_that_stood_still_gives_no_live_worker_s_place_away() -> None:
    """The Registers of others are read before the tick that would lengthen the lease."""
    clock = Clockwork()
    session = clock.register(incarnation=5)
    clock.now += 100 * LEASE
    assert clock.refused(incarnation=4).reason is Reason.STALE_INCARNATION
    assert clock.refused(incarnation=6).reason is Reason.WORKER_ELSEWHERE
    assert clock.refused(incarnation=6).retry_seconds == 0.0
    clock.keep_alive(session)


def test_what_the_newer_process_still_has_under_way_does_nothing_when_the_older_one_has_returned() -> None:
    """Its calls name a session that has ended; its Register waits for the older one's end."""
    clock = Clockwork()
    newer = clock.register(incarnation=9)
    clock.run(2 * LEASE)
    older = clock.register(incarnation=7)
    before = snapshot(clock.manager)
    late = AllocateItem(key("s"), ROOT, token_bytes([1]))
    assert refused(clock.manager.allocate, Uplink(newer, 1), [late]).reason is Reason.STALE_SESSION
    assert clock.refused(incarnation=9, register_no=2).reason is Reason.WORKER_ELSEWHERE
    clock.manager.deregister(newer)
    assert snapshot(clock.manager) == before
    clock.keep_alive(older)


def test_a_process_that_replaces_another_is_taken_at_once() -> None:
    """It has the key of the one before it from the state folder, whose lock that one held to its end. Once only: a copy of the
    folder, on a machine that is a clone, proves nothing of the process that came after."""
    clock = Clockwork()
    clock.register(incarnation=5)
    clock.register(incarnation=6, replaces=5)
    assert clock.refused(incarnation=7, replaces=5).reason is Reason.WORKER_ELSEWHERE
    fourth = successor(registration(incarnation=6))
    clock.manager.register(fourth, clock.now)


def test_known_incarnations_are_bounded_and_never_those_of_live_workers() -> None:
    manager = CacheManager(1, limits=Limits(max_workers=2, max_known_incarnations=3))
    stays = manager.register(registration("stays", incarnation=7), 0.0).session
    for i in range(10):
        gone = manager.register(registration(f"gone{i}", incarnation=7), 0.0)
        manager.deregister(gone.session)
    for worker_id in ("stays", "gone9", "gone8"):
        refusal = refused(manager.register, registration(worker_id, incarnation=6), 0.0)
        assert refusal.reason is Reason.STALE_INCARNATION
    manager.register(registration("gone0", incarnation=6), 0.0)
    manager.keep_alive(stays, 0, WorkerLoad(), 0.0)


def test_a_larger_epoch_begins_larger_sessions_and_generations() -> None:
    """Stamps are epoch << 40 | counter, so those of a later life are larger than all of an earlier one."""
    worker = Desk()
    before = max(worker.grant("a", range(9)).tables[0].generations)
    worker.manager.raise_epoch(9)
    assert min(worker.grant("b", range(9, 18)).tables[0].generations) > before
    assert worker.manager.last_generation >> 40 == 9
    number = worker.lockstep.register(registration("w2"))
    assert not isinstance(number, Refusal)
    assert number >> 40 == 9
    assert number > worker.number
