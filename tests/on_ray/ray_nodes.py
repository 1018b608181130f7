"""Ray nodes on this machine, in a process of their own: Ray forks in a way that a process with gRPC's threads may not survive.

Each line on stdin is a JSON list, a method of `RayNodes` and its arguments; the answer is a JSON value in a line on stdout.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# Before Ray is imported: it neither replaces 127.0.0.1 by the machine's address nor reports its usage.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray.cluster_utils import Cluster


class RayNodes:
    """The head, which has room for nothing, as where Ray is run by others; and nodes that are added and removed."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._nodes: dict[str, Any] = {}
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "node_ip_address": host, "include_dashboard": False},
        )

    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, num_cpus: int, variables: dict[str, str]) -> str:
        """Add a node whose processes have these variables; returns its id."""
        node = self._cluster.add_node(num_cpus=num_cpus, node_ip_address=self._host, env_vars=variables)
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def raylet(self, node: str) -> int:
        """Process id of Ray's own process on the node."""
        return int(self._nodes[node].all_processes["raylet"][0].process.pid)

    def remove(self, node: str) -> None:
        """Kill what Ray has started on the node. Ray notices after a while."""
        self._cluster.remove_node(self._nodes[node], allow_graceful=False)

    def leave(self, node: str) -> None:
        """End what Ray has started on the node, in order, so that nothing more is placed there."""
        self._cluster.remove_node(self._nodes[node], allow_graceful=True)

    def close(self) -> None:
        self._cluster.shutdown()


def main(host: str) -> None:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints
    nodes = RayNodes(host)
    answers.write('"ready"\n')
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        answers.write(json.dumps(getattr(nodes, method)(*arguments)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
