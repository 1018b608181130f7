"""A worker that is told to leave while its Register is under way: one simulated network, and the Register comes when it likes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.session import SessionEnd
from tests.simulation import patches
from tests.simulation.rpc import Call, UnaryCall
from tests.simulation.worker import Machine
from tests.simulation.world import World


class _Leaving:
    """A manager and one worker. `held`: the Register that was sent after `num_heard` others, and comes when it likes."""

    def __init__(self, world: World, num_heard: int) -> None:
        self.world = world
        self.held: Call | None = None
        self._num_heard = num_heard
        world.bus.rules.append(self._hold)
        assert not world.leader_lease
        world.bus.machines[world.manager_addresses[0]] = world.manager_machines[0]
        world._start_manager()
        plan = world.plans[0]
        world._start_worker(Machine(plan.worker_id, plan, world.kernel))
        (self.worker,) = world.live_workers()

    def _hold(self, kind: str, call: Call) -> bool:
        if kind != "request" or call.method != "Register" or self.held is not None:
            return False
        self._num_heard -= 1
        self.held = call if self._num_heard < 0 else None
        return self.held is not None

    def until(self, condition: Callable[[], Any], seconds: float = 30.0) -> None:
        end = self.world.kernel.now + seconds
        while not condition():
            assert self.world.kernel.step()
            assert self.world.kernel.now < end, "it does not come to that"
            assert self.world.violation is None, self.world.violation

    def deliver(self) -> None:
        """It arrives; nobody hears the answer."""
        assert isinstance(self.held, UnaryCall)
        self.held._arrive(True)

    @property
    def core(self) -> CacheManager:
        assert self.world.manager is not None
        return self.world.manager.core


@pytest.mark.parametrize("num_heard", [0, 1], ids=["the first", "a later one"])
@pytest.mark.parametrize("when", ["before it leaves", "while it leaves", "after it has left"])
def test_no_session_outlives_a_worker_that_leaves_while_it_registers(num_heard: int, when: str) -> None:
    """Its Deregister may overtake the Register, and names the session that was answered last, if one was."""
    world = World(1)
    with patches.installed(world), contextlib.ExitStack() as stack:
        stack.callback(world._wind_up)
        case = _Leaving(world, num_heard)
        worker = case.worker
        if num_heard:
            case.until(lambda: worker.cache.is_ready())
            (session,) = case.core.sessions
            case.core.end_session(session.number, SessionEnd.EXPIRED)
        case.until(lambda: case.held)
        if when == "before it leaves":
            case.deliver()
            assert len(case.core.sessions) == 1
        worker.deliver(worker.engine.drain_asked.set)  # as SIGTERM does
        if when == "while it leaves":
            case.until(lambda: worker.is_leaving)
            case.deliver()
        case.until(lambda: worker.is_dead)
        if when == "after it has left":
            case.deliver()
        end = world.kernel.now + 0.04  # a lease is some seconds
        case.until(lambda: world.kernel.now >= end)
        assert [s for s in case.core.sessions if s.registration.incarnation == worker.incarnation] == []
        assert worker.link.has_left
        assert world.counts["law: who has left is gone"] == 1
        assert world.violation is None, world.violation
