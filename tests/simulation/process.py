"""A simulated process: its loop, its clock, and what can befall it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.channel import Leaders
from tests.simulation.disk import PowerLoss
from tests.simulation.event_loop import Clock, SimLoop

if TYPE_CHECKING:
    from tests.simulation.world import World

POWER_LOSS_SECONDS = 0.01
"""What a process sent so shortly before the power went has not left the machine."""


class Process:
    """Runs at one place until it exits or dies. What arrives while it is frozen waits for it."""

    def __init__(self, world: World, name: str, machine: str) -> None:
        world.processes.append(self)
        self.world = world
        self.kernel = world.kernel
        self.name = name
        self.machine = machine
        """Whose links it uses."""
        self.is_dead = False
        self.is_frozen = False
        self.died_at = 0.0
        self.lost_power = False
        self.handlers: dict[str, Any] = {}
        """What it serves, by the name of the method."""
        self._random = world.kernel.random(f"process {name}")
        rate = 1.0 + self._random.uniform(-0.05, 0.05)
        clock = Clock(self.kernel, self._random.uniform(0.0, 1000.0), rate)
        self.loop = SimLoop(clock, on_due=self._on_due, execute=self._execute)  # type: ignore[abstract]
        self.leaders = Leaders(world.manager_addresses)
        self._inbox: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._wake_no = 0

    # -- what happens to it

    def deliver(self, callback: Callable[..., object], *args: Any) -> None:
        if self.is_dead:
            return
        if self.is_frozen:
            self._inbox.append((callback, args))
            return
        self.loop.turn(callback, *args)
        if self.loop.is_stopped and not self.is_dead:
            self.crash()
            return
        if self.loop.failures:
            self.world.fail("no surprises", f"{self.name}: {self.loop.failures[0]}")
        self.after_turn()

    def on_call(self, method: str) -> None:
        """It calls somebody."""

    def on_request(self, method: str, request: Any) -> None:
        """It sends one of the requests of a stream."""

    def after_turn(self) -> None:
        """For the laws of what a turn may have touched."""

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Begin a task; its first steps are done at once."""
        tasks: list[asyncio.Task[Any]] = []
        self.deliver(lambda: tasks.append(self.loop.create_task(coroutine)))
        return tasks[0]

    def crash(self, *, lost_power: bool = False) -> None:
        """End it at this very point: nothing of it says anything more."""
        if self.is_dead:
            return
        self.is_dead = True
        self.died_at, self.lost_power = self.kernel.now, lost_power
        self.loop.is_stopped = True
        self._inbox.clear()
        self.kernel.note(f"dead {self.name}")
        self.kernel.trace(self.name, "dies" + (", and its machine with it" if lost_power else ""))
        self.world.bus.on_death(self)
        self.on_death()

    def on_death(self) -> None:
        """For those who start it again."""

    def freeze(self) -> None:
        """It does not run any more; its clock does, and what arrives waits."""
        if not self.is_dead:
            self.is_frozen = True
            self.kernel.trace(self.name, "is frozen")

    def thaw(self) -> None:
        """It runs again. What has arrived and what is due meanwhile comes in either order."""
        if self.is_dead or not self.is_frozen:
            return
        self.is_frozen = False
        self.kernel.trace(self.name, f"is thawed; {len(self._inbox)} messages wait")
        inbox, self._inbox = self._inbox, []
        timers_first = self._random.random() < 0.5
        if timers_first:
            self._wake(self._wake_no)
        for callback, args in inbox:
            self.deliver(callback, *args)
        if not timers_first:
            self._wake(self._wake_no)

    def change_clock(self, jump: float, rate: float) -> None:
        self.loop.clock.change(jump, rate)
        if not self.is_dead:
            self.loop.rearm()

    # -- its loop

    def _on_due(self, when: float) -> None:
        self._wake_no += 1
        # A little time always passes: who sleeps for 1e-14 s finds the clock moved on, as on any machine.
        self.kernel.at(max(when, self.kernel.now + 1e-6), self._wake, self._wake_no)

    def _wake(self, number: int) -> None:
        if number == self._wake_no and not self.is_dead and not self.is_frozen:
            self.deliver(self.loop.run_timers)

    def _execute(
        self, loop: SimLoop, executor: Any, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> asyncio.Future[Any]:
        """A thread of its own: done a little later."""
        future = loop.create_future()
        self.kernel.after(self._random.expovariate(500.0), self.deliver, self._finish, future, function, args)
        return future

    def _finish(self, future: asyncio.Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            result = function(*args)
        except PowerLoss:
            self.loop.is_stopped = True
            return
        except Exception as error:
            if not future.done():
                future.set_exception(error)
            return
        if not future.done():
            future.set_result(result)
