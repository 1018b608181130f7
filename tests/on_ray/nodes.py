"""A Ray cluster of several nodes on this machine, on 127.0.0.1 only, and `kvpool ray` as a user runs it there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.client.processes import parent
from tests.live.workload import Model

HOST: Final = "127.0.0.1"
_ROOT: Final = Path(__file__).parents[2]
_SLOW_DEVICE: Final = Path(__file__).with_name("slow_device")
COMMAND: Final = (sys.executable, "-m", "kvpool.cli", "ray")


@dataclass(frozen=True)
class Service:
    """A process as `kvpool ray status --json` shows it."""

    name: str
    state: str
    node: str | None
    """Ray's id of the node."""
    address: str | None
    pid: int | None

    def kill(self) -> None:
        """End it as a crash would."""
        assert self.pid is not None
        os.kill(self.pid, signal.SIGKILL)


class _Answering:
    """A process that answers each line of JSON with one."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: object) -> Any:
        """The answer; one question at a time."""
        assert self._process.stdin is not None
        with self._lock:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            return self.answer()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{self._module} has ended with {self._process.wait()}: see the log"
        return json.loads(line)

    def close(self) -> None:
        """It ends with its stdin."""
        self._process.communicate(timeout=30)


class Nodes:
    """A head that has room for nothing, and nodes that are added and lost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_added = 0
        self._nodes: list[str] = []
        self._ray = _Answering("tests.on_ray.ray_nodes", [HOST], os.environ)
        assert self._ray.answer() == "ready"
        self._environment = {**os.environ, "RAY_ADDRESS": str(self._ray.ask(["address"]))}
        self._commands = _Answering("tests.on_ray.commands", [], self._environment)

    def close(self) -> None:
        self._commands.close()
        try:
            self._ray.ask(["close"])
        finally:
            self._ray.close()

    def add(self, num_cpus: int) -> str:
        """Returns the id of the new node. It has a disk of its own: what a process keeps there is lost with the node. Workers on it
        have slow devices."""
        state = self._folder / f"node-{self._num_added}"
        self._num_added += 1
        state.mkdir()
        path = [str(_SLOW_DEVICE), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": os.pathsep.join(path),
            "XDG_STATE_HOME": str(state),
        }
        node: str = self._ray.ask(["add", num_cpus, variables])
        self._nodes.append(node)
        return node

    def clear(self) -> None:
        """End what runs, and remove all nodes but the head."""
        if self.services():
            self.kvpool("down")
        for node in self._nodes:
            self._ray.ask(["leave", node])
        self._nodes.clear()

    def kvpool(self, *arguments: str, status: int = 0, **variables: str) -> str:
        """Run `kvpool ray …`; returns what it has written."""
        done = self._commands.ask({"arguments": arguments, "variables": variables})
        written: str = done["stdout"] + done["stderr"]
        assert done["status"] == status, f"{arguments}: {done['status']}\n{written}"
        return written

    @contextlib.contextmanager
    def in_the_foreground(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """`kvpool ray up`, which stays."""
        with subprocess.Popen(
            [*COMMAND, "up", *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def services(self) -> dict[str, Service]:
        """All processes of kvpool, by name."""
        done = self._commands.ask({"arguments": ["status", "--json"], "variables": {}})
        assert done["status"] == 0, done
        fields = Service.__dataclass_fields__
        return {
            entry["name"]: Service(**{name: entry[name] for name in fields})
            for entry in json.loads(done["stdout"])["services"]
        }

    def until_all_run(self, *but: str, seconds: float = 90.0) -> dict[str, Service]:
        """Wait until all processes run, except for these."""
        ends_at = time.monotonic() + seconds
        while True:
            services = self.services()
            if services and all(service.state == "runs" or name in but for name, service in services.items()):
                return services
            assert time.monotonic() < ends_at, services
            time.sleep(0.2)

    def lose(self, node: str) -> None:
        """All that runs on a node is gone at once, as when its power fails; nobody there says that anything ended."""
        children = [
            service.pid for service in self.services().values() if service.node == node and service.pid is not None
        ]
        raylet = self._ray.ask(["raylet", node])
        actors = [parent(child) for child in children]
        for pid in (raylet, *actors):
            os.kill(pid, signal.SIGSTOP)
        for pid in (*children, *actors):
            os.kill(pid, signal.SIGKILL)
        self._ray.ask(["remove", node])
        self._nodes.remove(node)


def flags(model: Model, **settings: object) -> list[str]:
    """Of `kvpool ray up`, for workers of a tiny model in fp32."""
    sizes = {"block_size": model.block_size, "num_blocks": 4096}
    given = {**settings, "model": model.path, "dtype": "float32", **sizes, "grace_seconds": 2}
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
