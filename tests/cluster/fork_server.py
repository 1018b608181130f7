"""A process that has imported the services, and forks each one that is started.

To import torch and transformers takes four seconds of CPU time, many times what a service with a tiny model needs until it serves.
The fork server imports them once. It starts no thread, does not initialise gRPC and computes nothing, so that a child is in the
state of a new interpreter after its imports. Each child has the environment of the server, since libraries read it when they are
imported, and ends as a program does. The server and its children end with the process that started it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

# Asks the kernel to end this process with the one that started it, whose id is the first argument, and becomes the program that the
# others name.
END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def ending_with_this_process(*arguments: str) -> list[str]:
    """A command that runs `python arguments…`, and that the kernel ends with this process."""
    return [sys.executable, "-I", "-S", "-c", END_WITH_PARENT, str(os.getpid()), sys.executable, *arguments]


MANAGER_MODULE = "kvpool.cache_service"
WORKER_MODULE = "kvpool.worker_service"
SLOW_WORKER_MODULE = "tests.slow_worker"
HURRIED_MANAGER_MODULE = "tests.hurried_manager"
_IMPORTED_LATER = {WORKER_MODULE: ("kvpool.worker_service.server", "transformers.models.llama.modeling_llama")}
"""What a service imports after its settings are read."""

_ROOT = Path(__file__).parents[2]
_OF_ONE_TEST = "PYTEST_CURRENT_TEST"
"""A variable that changes with each test, and that no service reads."""


class ForkServer:
    """Starts services; the server process starts with the first one. Blocks; for one thread at a time."""

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        modules: Sequence[str] = (MANAGER_MODULE, WORKER_MODULE, SLOW_WORKER_MODULE, HURRIED_MANAGER_MODULE),
    ) -> None:
        """`environment`: of all services. `modules`: the services that it can start."""
        self._environment = _lasting(environment)
        self._modules = frozenset(modules)
        self._process: subprocess.Popen[str] | None = None

    def can_start(self, module: str, environment: Mapping[str, str]) -> bool:
        """Whether a child would be what `python -m module` is in this environment."""
        return module in self._modules and _lasting(environment) == self._environment

    def start(self, module: str, arguments: Sequence[str], log: Path) -> ForkedProcess:
        """Start a service, which gets this process's working directory and limit of open files. `log`: for stdout and stderr, which
        are appended."""
        pid = self.call(
            start=module,
            arguments=list(arguments),
            log=str(log.resolve()),
            directory=os.getcwd(),
            limit_of_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        )
        return ForkedProcess(self, pid)

    def call(self, **request: Any) -> Any:
        process = self.begin()
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(request), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        assert answer, f"the fork server ended with status {process.wait(10)}"
        return json.loads(answer)

    def stop(self) -> None:
        """End the server, and with it the services that still run. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            with process:
                process.kill()

    def begin(self) -> subprocess.Popen[str]:
        """The server's process, started if it does not run. It ends with the thread that starts it."""
        if self._process is not None:
            return self._process
        self._process = subprocess.Popen(
            ending_with_this_process("-m", __name__, *sorted(self._modules)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=self._environment,
            start_new_session=True,  # a Ctrl-C in the terminal is for the tests, which then stop it
        )
        return self._process


class ForkedProcess:
    """A service that a fork server has started, with the methods of `subprocess.Popen` that the tests need."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Exit status, -n after signal n; None while it runs."""
        if self._status is None:
            self._status = self._server.call(status_of=self.pid)
        return self._status

    def wait(self, timeout: float) -> int:
        """The exit status, once it has one. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the process has ended. Its id is not given to another one before `poll` has said so."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != _OF_ONE_TEST}


# -- the server's process


def _serve(modules: Sequence[str]) -> None:
    """Answer requests, one JSON value a line, until the end of stdin. In a child it does not return: the service runs instead."""
    mains = {module: importlib.import_module(f"{module}.__main__") for module in modules}
    for module in modules:
        for later in _IMPORTED_LATER.get(module, ()):
            importlib.import_module(later)
    if WORKER_MODULE in modules:
        # 900 regular expressions, which transformers compiles once in a process, when it loads its first model.
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process of several threads cannot be forked: {threads}"
    gc.collect()
    gc.freeze()  # a collection in a child would write to all objects, and so copy their memory
    server = os.getpid()
    while line := sys.stdin.readline():
        request = json.loads(line)
        if (module := request.get("start")) is None:
            answer = _status_of(request["status_of"])
        elif (answer := os.fork()) == 0:
            _run(mains[module], server, request)
        print(json.dumps(answer), flush=True)


def _status_of(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _run(service: Any, server: int, request: Mapping[str, Any]) -> NoReturn:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != server:
        sys.exit(1)
    os.chdir(request["directory"])
    resource.setrlimit(resource.RLIMIT_NOFILE, request["limit_of_files"])
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)
    sys.argv = [service.__file__, *request["arguments"]]
    sys.exit(service.main())


if __name__ == "__main__":
    _serve(sys.argv[1:])
