"""An engine in a separate process, connected by a pipe: the parent's side, an Engine for the load generator.

All engines that are compared without gRPC use it, kvpool's too: one line per step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvpool.load.engine import Delivery, ServedRequest

_MAX_LINE_BYTES: Final = 1 << 24
_LOG_CHARS: Final = 2000
_END_SECONDS: Final = 10.0
"""For a process to exit after its input is closed."""


class EngineFailed(Exception):
    """The process has ended, or could not serve a request."""


class PipedEngine:
    """Start it with `start`; see kvpool.load.engine.EngineUnderLoad for the rest."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path, served: ServedRequest) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        """Its name and versions, from its first message."""
        self._process = process
        self._log = log
        self._served = served
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Queue[Delivery | EngineFailed]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._ended: EngineFailed | None = None

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], environment: Mapping[str, str], served: ServedRequest, seconds: float
    ) -> PipedEngine:
        """Start the process, and wait at most `seconds` until it is ready. Raises EngineFailed with the end of its log."""
        handle, path = tempfile.mkstemp(prefix="kvpool-bench-", suffix=".log")
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=handle,
            env={**os.environ, **environment},
            limit=_MAX_LINE_BYTES,
            # A process group with all its children, so that none outlives it, and Ctrl-C reaches only the parent.
            start_new_session=True,
        )
        os.close(handle)
        engine = cls(name, process, Path(path), served)
        try:
            async with asyncio.timeout(seconds):
                engine.facts = (await engine._read())["ready"]
        except BaseException as error:  # also a cancellation: no other code can end the process yet
            log = engine._end_of_log()
            engine._signal_all(signal.SIGKILL)
            await engine.close()
            if isinstance(error, TimeoutError):
                raise EngineFailed(f"{name} was not ready after {seconds:.0f} s{log}") from None
            raise
        engine._reading = asyncio.create_task(engine._read_all())
        return engine

    @property
    def pid(self) -> int:
        return self._process.pid

    async def served(self) -> ServedRequest:
        """See Engine."""
        return self._served

    async def generate(self, prompt: Sequence[int], num_tokens: int) -> AsyncGenerator[Delivery, None]:
        """See Engine."""
        if self._ended is not None:
            raise self._ended
        number = next(self._numbers)
        deliveries = self._waiting[number] = asyncio.Queue()
        missing = num_tokens
        self._write({"id": number, "prompt": list(prompt), "num_tokens": num_tokens})
        try:
            while missing > 0:
                delivery = await deliveries.get()
                if isinstance(delivery, EngineFailed):
                    missing = 0
                    raise delivery
                missing -= len(delivery.token_ids)
                yield delivery
        finally:
            del self._waiting[number]
            if missing > 0:
                self._write({"cancel": number})

    async def close(self) -> None:
        """End its process. Idempotent."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self.resume()
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _END_SECONDS)
        self._signal_all(signal.SIGKILL)
        await self._process.wait()
        self._log.unlink(missing_ok=True)

    def suspend(self) -> None:
        """Stop all its processes: some engines use a core while they are idle, which would disturb measurements of others."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue all its processes."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        """Signal its process group, if there is still one."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> Any:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise EngineFailed(f"{self.name} has ended{self._end_of_log()}")
        return json.loads(line)

    async def _read_all(self) -> None:
        """Deliver the messages. When the process ends, all waiting requests get the error."""
        try:
            while True:
                message = await self._read()
                if "failed" in message:
                    self._deliver(message["failed"], EngineFailed(f"{self.name}: {message['why']}"))
                for number, token_ids, num_cached in message.get("came", ()):
                    self._deliver(number, Delivery(tuple(token_ids), num_cached))
        except EngineFailed as error:
            self._ended = error
            for deliveries in self._waiting.values():
                deliveries.put_nowait(error)

    def _deliver(self, number: int, what: Delivery | EngineFailed) -> None:
        if number in self._waiting:
            self._waiting[number].put_nowait(what)

    def _end_of_log(self) -> str:
        log = self._log.read_text(errors="replace")[-_LOG_CHARS:].strip()
        return f"; the end of its log:\n{log}" if log else ""
