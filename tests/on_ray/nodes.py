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

# Before Ray is imported: it neither replaces 127.0.0.1 by the machine's address nor reports its usage.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray.cluster_utils import Cluster

HOST: Final = "127.0.0.1"
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


class Nodes:
    """The head, which has room for nothing, as where Ray is run by others; and nodes that are added and lost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: dict[str, Any] = {}
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "node_ip_address": HOST, "include_dashboard": False},
        )

    def close(self) -> None:
        self._cluster.shutdown()

    def add(self, num_cpus: int) -> str:
        """Returns the id of the new node. It has a disk of its own: what a process keeps there is lost with the node."""
        state = self._folder / f"node-{len(self._nodes)}"
        state.mkdir()
        node = self._cluster.add_node(
            num_cpus=num_cpus,
            node_ip_address=HOST,
            env_vars={"XDG_STATE_HOME": str(state), "OMP_WAIT_POLICY": "PASSIVE"},
        )
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def state_home(self, node: str) -> Path:
        """$XDG_STATE_HOME of a node."""
        return self._folder / f"node-{list(self._nodes).index(node)}"

    def kvpool(self, *arguments: str, status: int = 0, **variables: str) -> str:
        """Run `kvpool ray …`; returns what it has written."""
        done = self._run(arguments, status, variables)
        return done.stdout + done.stderr

    def _run(
        self, arguments: Sequence[str], status: int = 0, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "kvpool.client.cli", "ray", *arguments],
            env={**os.environ, "RAY_ADDRESS": str(self._cluster.address), **(variables or {})},
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
            [sys.executable, "-m", "kvpool.client.cli", "ray", "up", *arguments],
            env={**os.environ, "RAY_ADDRESS": str(self._cluster.address)},
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
        listed = json.loads(self._run(["status", "--json"]).stdout)["services"]
        fields = Service.__dataclass_fields__
        return {entry["name"]: Service(**{name: entry[name] for name in fields}) for entry in listed}

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
        raylet = self._nodes[node].all_processes["raylet"][0].process.pid
        actors = [parent(child) for child in children]
        began = time.monotonic()
        for pid in (raylet, *actors):
            os.kill(pid, signal.SIGSTOP)
        for pid in (*children, *actors):
            os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(self._nodes[node], allow_graceful=False)
        return began


def parent(pid: int) -> int:
    """Process id of the parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
