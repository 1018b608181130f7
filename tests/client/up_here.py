"""`kvpool up` in this process, with managers and workers that are forked: a worker of its own process imports torch for seconds."""

from __future__ import annotations

import asyncio
import io
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from rich.console import Console

from kvpool.cli.commands.up import FLAGS, UpSettings, run_cluster
from kvpool.cli.launch.cluster import MANAGER_NAME
from kvpool.cli.launch.log import JsonLog, Log, PrefixedLog
from kvpool.cli.terminal import PIPED_WIDTH
from kvpool.process.settings import load_settings
from tests.cluster.forked_children import forked_children
from tests.cluster.process import Process

_END_SECONDS: Final = 60.0


class UpHere:
    """It runs in a thread of its own, between `start` and `end`. Settings are flags: variables of this process and a settings file
    reach no child that is forked."""

    def __init__(self, arguments: Sequence[str]) -> None:
        own, of_workers = FLAGS.split(list(arguments))
        settings = load_settings(UpSettings, own)
        self._spec = settings.spec(of_workers)
        self._output = io.StringIO()
        self._log: Log = PrefixedLog(Console(file=self._output, width=PIPED_WIDTH))
        if settings.log_format == "json":
            self._log = JsonLog(self._output, MANAGER_NAME)
        self._signals: dict[int, Callable[[], object]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="kvpool up", daemon=True)
        self.status: int | None = None

    @property
    def output(self) -> str:
        return self._output.getvalue()

    def start(self) -> None:
        assert Process.fork_server is not None
        Process.fork_server.begin()  # by this thread: the server ends with the one that starts it
        self._thread.start()

    def wait(self) -> int | None:
        """Its exit status, once it has ended; None: it has not within a minute."""
        self._thread.join(_END_SECONDS)
        return self.status

    def end(self) -> int | None:
        """Stop it as SIGTERM does, if it still runs; returns what `wait` does."""
        if self._thread.is_alive() and self._loop is not None:
            self._loop.call_soon_threadsafe(self._signals[signal.SIGTERM])
        return self.wait()

    def until(self, text: str, seconds: float = 240.0) -> str:
        """The output, once it has that text. An assertion with all of it if the text does not come."""
        deadline = time.monotonic() + seconds
        while text not in (output := self.output):
            assert self._thread.is_alive(), f"no {text!r} in:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} yet in:\n{output}"
            time.sleep(0.02)
        return output

    def _run(self) -> None:
        with forked_children(), asyncio.Runner(loop_factory=self._new_loop) as runner:
            self.status = runner.run(run_cluster(self._spec, self._log, Console(quiet=True)))

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()

        def add_signal_handler(number: int, callback: Callable[..., object], *arguments: Any) -> None:
            self._signals[number] = partial(callback, *arguments)

        loop.add_signal_handler = add_signal_handler  # type: ignore[assignment, method-assign]  # only a main thread gets signals
        self._loop = loop
        return loop
