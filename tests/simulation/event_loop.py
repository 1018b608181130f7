"""An asyncio event loop without time, threads or sockets of its own: one per simulated process, stepped by the kernel."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.simulation.kernel import Kernel

_ALMOST = 1e-9
"""Clock readings are products; what is due by so little is due."""


class Clock:
    """A process's own clock: runs fast or slow, and may jump forwards."""

    def __init__(self, kernel: Kernel, start: float, rate: float) -> None:
        self._kernel = kernel
        self._from_wall = kernel.now
        self._from_local = start
        self._rate = rate

    def now(self) -> float:
        """What the process reads."""
        return self._from_local + (self._kernel.now - self._from_wall) * self._rate

    def wall(self, local: float) -> float:
        """When the wall will show what this clock shows at `local`."""
        return self._from_wall + (local - self._from_local) / self._rate

    def change(self, jump: float, rate: float) -> None:
        self._from_local = self.now() + jump
        self._from_wall = self._kernel.now
        self._rate = rate


Executor = Callable[["SimLoop", Any, Callable[..., Any], tuple[Any, ...]], "asyncio.Future[Any]"]


class SimLoop(asyncio.AbstractEventLoop):
    """What asyncio's tasks, futures, locks and time-outs need of a loop, and nothing else."""

    def __init__(self, clock: Clock, *, on_due: Callable[[float], None], execute: Executor) -> None:
        self.clock = clock
        self.num_callbacks_left: int | None = None
        """The process dies behind so many callbacks."""
        self.is_stopped = False
        self.failures: list[str] = []
        """What nobody caught."""
        self._on_due = on_due
        self._execute = execute
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = 0
        self._due_at: float | None = None
        self._is_closed = False

    # -- for the kernel

    def turn(self, callback: Callable[..., object], *args: Any) -> None:
        """Something has happened to the process: let it do all that follows without waiting."""
        ready = self._ready
        _set_running_loop(self)
        try:
            callback(*args)
            while ready and not self.is_stopped:
                if self.num_callbacks_left is not None:
                    if self.num_callbacks_left <= 0:
                        self.is_stopped = True
                        break
                    self.num_callbacks_left -= 1
                handle = ready.popleft()
                if not handle.cancelled():
                    # As its `_run`, which would hide errors.
                    handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
        finally:
            _set_running_loop(None)
        if not self.is_stopped:
            self.arm()

    def run_timers(self) -> None:
        """Make ready what is due; inside a turn."""
        self._due_at = None
        now = self.clock.now() + _ALMOST
        while self._timers and self._timers[0][0] <= now:
            handle = heapq.heappop(self._timers)[2]
            if not handle.cancelled():
                self._ready.append(handle)

    def arm(self) -> None:
        """Say when the next timer is due, if that is news."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if timers and (self._due_at is None or timers[0][0] < self._due_at):
            self._due_at = timers[0][0]
            self._on_due(self.clock.wall(self._due_at))

    def rearm(self) -> None:
        """The clock has changed: timers are due at other times than said."""
        self._due_at = None
        self.arm()

    def wind_up(self) -> None:
        """Let every coroutine come to its end, whatever it still wants, so that none is left to the garbage collector."""
        self.is_stopped, self.num_callbacks_left = False, None
        for _ in range(20):
            tasks = [task for task in asyncio.all_tasks(self) if not task.done()]
            if not tasks and not self._ready:
                break
            for task in tasks:
                task.cancel()
            self._timers.clear()
            self.turn(lambda: None)
        self._is_closed = True

    # -- for asyncio

    def time(self) -> float:
        return self.clock.now()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.clock.now() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        self._count += 1
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name or "task", context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        return self._execute(self, executor, func, args)

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> list[Any]:
        """Every name resolves; only whether it does is of interest."""
        return []

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._is_closed and not self.is_stopped:
            self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._is_closed

    def is_closed(self) -> bool:
        return self._is_closed

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """asyncio tells the loop so that it may clean up; `arm` does."""
