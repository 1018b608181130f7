"""A worker that is told to leave while its Register is under way: one simulated network, and the Register comes when it likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvpool.cache_service.core.session import SessionEnd
from tests.simulation import patches
from tests.simulation.machine import Machine
from tests.simulation.rpc import Call
from tests.simulation.world import World


class _Leaving:
    """A manager and one worker. `held` is a Register that was sent and has not arrived, in both meanings of the word "late"."""

    def __init__(self, world: World, num_heard: int) -> None:
        """Registers `num_heard` of the worker arrive before the one that is held."""
        self.world = world
        self.held: list[Any] = []
        self._num_heard = num_heard
        world.bus.rules.append(self._hold)
        assert not world.leader_lease
        world.bus.machines[world.manager_addresses[0]] = world.manager_machines[0]
        world._start_manager()
        plan = world.plans[0]
        machine = world.machines[plan.worker_id] = Machine(plan.worker_id, plan, world.kernel)
        world._start_worker(machine)
        (self.worker,) = world.live_workers()

    def _hold(self, kind: str, call: Call) -> bool:
        if kind != "request" or call.method != "Register" or self.held:
            return False
        self._num_heard -= 1
        if self._num_heard >= 0:
            return False
        self.held.append(call)
        return True

    def until(self, condition: Callable[[], Any], seconds: float = 30.0) -> None:
        end = self.world.kernel.now + seconds
        while not condition():
            assert self.world.kernel.step()
            assert self.world.kernel.now < end, "it does not come to that"
            assert self.world.violation is None, self.world.violation

    def leave(self) -> None:
        """Order the worker to leave, as SIGTERM does."""
        self.worker.deliver(self.worker.engine.drain_asked.set)

    def deliver(self) -> None:
        self.held[0]._arrive(True)

    def sessions(self) -> list[Any]:
        assert self.world.manager is not None
        return list(self.world.manager.core.sessions)


@contextmanager
def leaving(seed: int, num_heard: int) -> Iterator[_Leaving]:
    world = World(seed)
    with patches.installed(world):
        try:
            yield _Leaving(world, num_heard)
            assert world.violation is None, world.violation
        finally:
            world._wind_up()


@pytest.mark.parametrize("num_heard", [0, 1], ids=["the first", "a later one"])
@pytest.mark.parametrize("when", ["before it leaves", "while it leaves", "after it has left"])
def test_no_session_outlives_a_worker_that_leaves_while_it_registers(num_heard: int, when: str) -> None:
    """Its Deregister may overtake the Register, and names the session that was answered last, if one was."""
    with leaving(1, num_heard) as case:
        if num_heard:
            case.until(lambda: case.worker.cache.is_ready())
            (session,) = case.sessions()
            assert case.world.manager is not None
            case.world.manager.core.end_session(session.number, SessionEnd.EXPIRED)
        case.until(lambda: case.held)
        if when == "before it leaves":
            case.deliver()
            assert len(case.sessions()) == 1
        case.leave()
        if when == "while it leaves":
            case.until(lambda: case.worker.is_leaving)
            case.deliver()
        case.until(lambda: case.worker.is_dead)
        if when == "after it has left":
            case.deliver()
        end = case.world.kernel.now + 0.04  # a lease is some seconds
        case.until(lambda: case.world.kernel.now >= end)
        gone = case.worker.incarnation
        assert [s for s in case.sessions() if s.registration.incarnation == gone] == []
        assert case.worker.link.has_left
        assert case.world.looks["who has left is gone"] == 1
