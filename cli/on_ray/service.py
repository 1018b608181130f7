"""Runs one process of kvpool as an actor of Ray.

An actor has its own process on the node where Ray has placed it. It starts the service as a child, and ends when the child does.
Ray then restarts the actor, there or on another node, and the actor the service. The child gets SIGTERM when the actor's process
dies: a worker then finishes what it can, and its successor waits for that."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final, NoReturn

import ray
from ray.exceptions import RayError

from kvpool.process.address import join_host_port
from kvpool.process.durable_file import write_durably
from kvpool.process.version import installed_version

from ..launch.children import ChildExit, tied
from ..launch.cluster import free_port
from .places import remove_place
from .plan import ServiceSpec, is_manager, is_worker, problem_of_disk

_REFUSES: Final = 2
"""Exit status of a process that cannot use its settings: restarting it would not help."""
_SHORTEST_LIFE_SECONDS: Final = 3.0
"""Shortest time between two starts of a process that dies at once."""
_HOLD_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.1
_LOOK_SECONDS: Final = 1.0


class Service:
    """The actor. Other actors and `kvpool ray` call its methods; all but `address` and `drain` answer at once."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """`spec` has the fields of a ServiceSpec."""
        self._spec = ServiceSpec(**spec)
        self._host: str = ray.util.get_node_ip_address()
        self._port = 0
        self._pid = 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_leaving = False
        self._started: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._problem = ""
        # The kernel's tie between child and parent is one to the thread that has started the child.
        threading.Thread(target=self._run, name="service", daemon=True).start()

    def __repr__(self) -> str:
        """Return the name that Ray writes before each line of the log."""
        return self._spec.name

    async def describe(self) -> dict[str, Any]:
        """Describe this process. `address` is empty for a worker, and before the start; `problem` says why it does not start."""
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "host": self._host,
            "address": join_host_port(self._host, self._port) if self._port and self._started.done() else "",
            "pid": self._pid,
            "problem": self._problem,
            "has_ended": self._ended.done(),
            "record": self._spec.record,
            "version": installed_version(),
        }

    async def address(self, known: str) -> str:
        """Return host:port of this manager, at once if it is another one than `known`. A caller that has it already waits here, and
        so learns at once when the actor ends; but not for ever, because nobody reports when a waiting caller has died."""
        await asyncio.wrap_future(self._started)
        address = join_host_port(self._host, self._port)
        if address == known:
            await asyncio.sleep(_HOLD_SECONDS)
        return address

    async def drain(self) -> None:
        """Ask the process to finish and leave, and wait until it has. It is not restarted."""
        with self._lock:
            self._is_leaving = True
            process = self._process
            if process is None and not self._ended.done():
                self._ended.set_result(None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        await asyncio.wrap_future(self._ended)

    async def remove(self, name: str) -> None:
        """End the actor `name`, and give its resources back to Ray. An actor whose process has left calls it, since no actor can
        remove itself."""
        await asyncio.to_thread(remove_actor, name, self._spec.namespace)

    def _run(self) -> None:
        try:
            status = self._serve()
        except Exception as error:
            _say(self._spec.name, f"cannot be started: {error}")
            time.sleep(_SHORTEST_LIFE_SECONDS)
            self._die()
        if status is not None:
            self._on_exit(status)

    def _serve(self) -> int | None:
        """Start the process and wait for its end; returns its exit status. None: it was asked to leave before the start."""
        began = time.monotonic()
        self._spec.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._wait_for_the_disk()
        if not is_manager(self._spec.name):
            managers = ManagersFile(self._spec)
            managers.follow_once()
            threading.Thread(target=managers.follow, name="managers", daemon=True).start()
        if not is_worker(self._spec.name):
            self._port = self._spec.port or free_port(self._host)
        command = tied(self._spec.command(self._host, self._port))
        with self._lock:
            if self._is_leaving:
                return None
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self._spec.variables},
                start_new_session=True,
            )
        self._pid = self._process.pid
        self._started.set_result(None)
        status = self._process.wait()
        if status and not self._is_leaving:
            time.sleep(max(0.0, _SHORTEST_LIFE_SECONDS - (time.monotonic() - began)))
        return status

    def _wait_for_the_disk(self) -> None:
        while (problem := problem_of_disk(self._spec, self._host)) and not self._is_leaving:
            if not self._problem:
                _say(self._spec.name, problem)
            self._problem = problem
            time.sleep(_LOOK_SECONDS)
        self._problem = ""

    def _on_exit(self, status: int) -> None:
        self._pid = 0
        self._ended.set_result(None)
        if self._is_leaving and is_manager(self._spec.name):
            return  # the caller of `drain` removes it, last
        if self._is_leaving or (is_worker(self._spec.name) and status == 0):
            _say(self._spec.name, "has left")
            self._remove_itself()
            return
        ended = ChildExit(self._spec.name, status)
        if status == _REFUSES:
            self._problem = "refuses its settings: its log says why"
            _say(self._spec.name, f"{ended}: it {self._problem}. It is not started again")
            return
        _say(self._spec.name, f"{ended}; Ray starts it again")
        self._die()

    def _remove_itself(self) -> None:
        while True:
            for name in self._spec.managers:
                with contextlib.suppress(RayError, ValueError, TimeoutError):
                    manager = ray.get_actor(name, namespace=self._spec.namespace)
                    manager.remove.remote(self._spec.name).future().result(_LOOK_SECONDS)
            time.sleep(_LOOK_SECONDS)

    def _die(self) -> NoReturn:
        """End this process, so that Ray restarts the actor."""
        sys.stderr.flush()
        os._exit(1)


class ManagersFile:
    """Keeps the file that lists the managers' addresses up to date."""

    def __init__(self, spec: ServiceSpec) -> None:
        self._spec = spec
        self._known: dict[str, str] = {}
        """Last known address of each manager, by name."""
        self._calls: dict[Future[str], str] = {}
        """Pending call of each manager, with its name. It ends with a new address, or when the manager ends."""

    def follow(self) -> NoReturn:
        """Follow the managers without end."""
        while True:
            try:
                self.follow_once()
            except (RayError, OSError) as error:  # Ray's head does not answer, or the disk is full
                _say(self._spec.name, f"cannot follow the managers: {error}")
                time.sleep(_LOOK_SECONDS)

    def follow_once(self) -> None:
        """Wait until a manager has a new address, and write the file."""
        while True:
            self._call()
            done, _ = wait(self._calls, _LOOK_SECONDS, FIRST_COMPLETED)
            if sum([self._on_answer(call) for call in done]):
                self._write()
                return
            if done:
                time.sleep(_POLL_SECONDS)  # an actor that has died takes a moment to start again

    def _call(self) -> None:
        for name in set(self._spec.managers) - set(self._calls.values()):
            try:
                manager = ray.get_actor(name, namespace=self._spec.namespace)
            except ValueError:
                time.sleep(_POLL_SECONDS)  # it has not been made yet
            else:
                # A future, because Ray warns of `ray.get` in actors with an event loop, also outside of it.
                self._calls[manager.address.remote(self._known.get(name, "")).future()] = name

    def _on_answer(self, call: Future[str]) -> bool:
        """Take in an answer; returns whether it has brought a new address. The address of a dead manager stays until it has another
        one."""
        name = self._calls.pop(call)
        try:
            address = call.result()
        except RayError:
            return False
        is_new = self._known.get(name) != address
        self._known[name] = address
        return is_new

    def _write(self) -> None:
        content = "".join(f"{self._known[name]}\n" for name in sorted(self._known))
        write_durably(self._spec.managers_file, content.encode())


def remove_actor(name: str, namespace: str) -> None:
    """End an actor for good, and remove its placement group, which has the same name. Neither needs to exist."""
    # The actor first: a placement group takes its actors with it, and Ray would wait for ever to restart them.
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(name, namespace=namespace), no_restart=True)
    remove_place(name)


def _say(name: str, what: str) -> None:
    print(f"kvpool ray: {name}: {what}", file=sys.stderr, flush=True)
