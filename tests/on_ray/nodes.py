"""A Ray cluster of several nodes on this machine, on 127.0.0.1 only, and `kvpool ray` as a user runs it there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.client.processes import parent
from tests.live.workload import Model

HOST: Final = "127.0.0.1"
COMMAND: Final = (sys.executable, "-m", "kvpool.client.cli", "ray")
COMMAND_SECONDS: Final = 240.0


@dataclass(frozen=True)
class Service:
    """A process as `kvpool ray status --json` shows it."""

    name: str
    state: str
    node: str | None
    """Ray's id of the node."""
    address: str | None
    pid: int | None

    def kill(self) -> float:
        """End it as a crash would; returns the time of that."""
        assert self.pid is not None
        began = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)
        return began


class Nodes:
    """A head that has room for nothing, and nodes that are added and lost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: list[str] = []
        self._statuses: subprocess.Popen[str] | None = None
        self._ray = subprocess.Popen(
            [sys.executable, "-m", "tests.on_ray.ray_nodes", HOST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"
        self._environment = {**os.environ, "RAY_ADDRESS": str(self._ask("address"))}

    def _ask(self, method: str, *arguments: object) -> Any:
        assert self._ray.stdin is not None
        self._ray.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._ray.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._ray.stdout is not None
        line = self._ray.stdout.readline()
        assert line, f"Ray's nodes have ended with {self._ray.wait()}: see the log"
        return json.loads(line)

    def close(self) -> None:
        if self._statuses is not None:
            self._statuses.communicate(timeout=30)
        try:
            self._ask("close")
        finally:
            self._ray.communicate(timeout=30)

    def add(self, num_cpus: int) -> str:
        """Returns the id of the new node. It has a disk of its own: what a process keeps there is lost with the node."""
        state = self._folder / f"node-{len(self._nodes)}"
        state.mkdir()
        node: str = self._ask("add", num_cpus, {"XDG_STATE_HOME": str(state), "OMP_WAIT_POLICY": "PASSIVE"})
        self._nodes.append(node)
        return node

    def kvpool(self, *arguments: str, status: int = 0, **variables: str) -> str:
        """Run `kvpool ray …`; returns what it has written."""
        done = self._run(arguments, status, variables)
        return done.stdout + done.stderr

    def _run(
        self, arguments: Sequence[str], status: int = 0, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*COMMAND, *arguments],
            env={**self._environment, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

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
        if self._statuses is None:
            self._statuses = subprocess.Popen(
                [sys.executable, "-m", "tests.on_ray.statuses"],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._statuses.stdin is not None
        assert self._statuses.stdout is not None
        print(file=self._statuses.stdin, flush=True)
        line = self._statuses.stdout.readline()
        assert line, "`kvpool ray status` has failed: see the log"
        fields = Service.__dataclass_fields__
        return {
            entry["name"]: Service(**{name: entry[name] for name in fields}) for entry in json.loads(line)["services"]
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

    def lose(self, node: str) -> float:
        """All that runs on a node is gone at once, as when its power fails; nobody there says that anything ended. Returns the time
        of that."""
        children = [
            service.pid for service in self.services().values() if service.node == node and service.pid is not None
        ]
        raylet = self._ask("raylet", node)
        actors = [parent(child) for child in children]
        began = time.monotonic()
        for pid in (raylet, *actors):
            os.kill(pid, signal.SIGSTOP)
        for pid in (*children, *actors):
            os.kill(pid, signal.SIGKILL)
        self._ask("remove", node)
        return began


def flags(model: Model, **settings: object) -> list[str]:
    """Of `kvpool ray up`, for workers of a tiny model in fp32."""
    of_workers = {
        "model": model.path,
        "dtype": "float32",
        "block_size": model.block_size,
        "num_blocks": 4096,
        "grace_seconds": 2,
    }
    given = {**settings, **of_workers}
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
