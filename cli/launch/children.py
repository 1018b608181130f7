"""Starts child processes and stops them together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

MAX_LINE_BYTES: Final = 8192
_READ_BYTES: Final = 65536
_KILL_WAIT_SECONDS: Final = 5.0

# Runs in the child before the service: asks the kernel for SIGTERM when its parent dies, even by SIGKILL, and
# becomes the service. (A preexec_fn would run Python between fork and exec, under gRPC's threads.)
_LAUNCHER: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` as a child of this process. On Linux the child gets SIGTERM when the thread that
    starts it ends, and so when this process dies, even by SIGKILL."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to start."""

    name: str
    """Name in prefixes and messages, e.g. "worker-0"."""
    command: Sequence[str]
    """Full path of the program, and its arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to this process's own."""

    async def start(self, *, stderr: int) -> asyncio.subprocess.Process:
        """Start it in a session of its own, with a pipe as stdout; `stderr` as in create_subprocess_exec. On Linux it gets SIGTERM
        when this process dies."""
        return await asyncio.create_subprocess_exec(
            *tied(self.command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **self.environment},
            start_new_session=True,
        )


class ChildExit(NamedTuple):
    name: str
    status: int
    """Exit status; −n: ended by signal n."""

    def __str__(self) -> str:
        if self.status < 0:
            return f"{self.name} was ended by {signal.Signals(-self.status).name}"
        return f"{self.name} ended with exit status {self.status}"


class Children:
    """Starts child processes, passes their log lines on, and stops them all: SIGTERM, a grace, SIGKILL.

    Children have sessions of their own, so that Ctrl-C reaches only this process, which stops them in order. Use it as
    `async with Children(…)`: no child outlives the block.
    """

    def __init__(
        self, on_line: Callable[[str, str], None], *, grace_seconds: float = 10.0, last: str | None = None
    ) -> None:
        """`on_line` gets the name of a child and a line of its output. `last` is the child that is stopped after all others."""
        self._on_line = on_line
        self._grace_seconds = grace_seconds
        self._last = last
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        """The latest process of each name, in the order of the first starts."""
        self._reported: set[str] = set()
        """Names of the children whose end `wait_for_exit` has returned."""
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._kill_now = asyncio.Event()

    async def __aenter__(self) -> Children:
        return self

    async def __aexit__(self, *_: object) -> None:
        # Shielded: a second Ctrl-C kills the children, and does not leave any running.
        stopping = asyncio.ensure_future(self.stop())
        while not stopping.done():
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError:
                self.kill_now()

    def pids(self) -> dict[str, int]:
        """Return the process ids of the started children by name, in the order of their first starts."""
        return {name: process.pid for name, process in self._processes.items()}

    async def start(self, spec: ChildSpec) -> None:
        """Start a child, or restart one whose end was reported. Lines of its stdout and stderr go to `on_line`."""
        assert spec.name not in self._processes or spec.name in self._reported, spec.name
        process = await spec.start(stderr=asyncio.subprocess.STDOUT)
        self._processes[spec.name] = process
        self._reported.discard(spec.name)
        assert process.stdout is not None
        self._pumps[spec.name] = asyncio.create_task(self._pump(spec.name, process.stdout))

    async def wait_for_exit(self) -> ChildExit:
        """Wait until any child has ended and its last lines are passed on; each end is returned once. May be cancelled. Raises the
        errors of `on_line`, e.g. for a terminal that is gone."""
        waits = {
            asyncio.create_task(process.wait()): name
            for name, process in self._processes.items()
            if name not in self._reported
        }
        pending: set[asyncio.Task[Any]] = {*waits, *self._pumps.values()}
        try:
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done - waits.keys():
                    task.result()
                for wait in done & waits.keys():
                    # Its last lines say why. A grandchild may hold the pipe open, so the wait is bounded.
                    await asyncio.wait({self._pumps[waits[wait]]}, timeout=1.0)
                    self._reported.add(waits[wait])
                    return ChildExit(waits[wait], wait.result())
        finally:
            for wait in waits:
                wait.cancel()

    def kill_now(self) -> None:
        """End the grace of `stop` now."""
        self._kill_now.set()

    async def stop(self) -> list[ChildExit]:
        """Stop all children and wait for them. May be repeated.

        All get SIGTERM at once, except for `last` (the manager): the others deregister there first.
        """
        names = list(self._processes)
        for group in ([name for name in names if name != self._last], [name for name in names if name == self._last]):
            await self._stop_group([self._processes[name] for name in reversed(group)])
        if self._pumps:
            done, _ = await asyncio.wait(self._pumps.values(), timeout=1.0)
            for pump in done:
                # wait_for_exit has raised the error of a log that cannot be written; here it is only retrieved.
                pump.exception()
        return [ChildExit(name, self._processes[name].returncode or 0) for name in names]

    async def _stop_group(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        waits = [asyncio.ensure_future(process.wait()) for process in processes if process.returncode is None]
        if not waits:
            return
        _signal_all(processes, signal.SIGTERM)
        killed = asyncio.ensure_future(self._kill_now.wait())
        ended = asyncio.gather(*waits)
        either: set[asyncio.Future[Any]] = {ended, killed}
        await asyncio.wait(either, timeout=self._grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if not ended.done():
            _signal_all(processes, signal.SIGKILL)
            await asyncio.wait({ended}, timeout=_KILL_WAIT_SECONDS)

    async def _pump(self, name: str, stream: asyncio.StreamReader) -> None:
        """Pass lines on until the child closes its output. A line longer than MAX_LINE_BYTES is passed on in pieces."""
        rest = b""
        while data := await stream.read(_READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            while len(rest) > MAX_LINE_BYTES:
                lines.append(rest[:MAX_LINE_BYTES])
                rest = rest[MAX_LINE_BYTES:]
            for line in lines:
                self._on_line(name, line.decode(errors="replace").rstrip("\r"))
        if rest:
            self._on_line(name, rest.decode(errors="replace"))


def _signal_all(processes: Sequence[asyncio.subprocess.Process], number: signal.Signals) -> None:
    for process in processes:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
