"""Our side of the cluster benchmark: a manager, one worker and a client, each its own process or loop, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.counting_manager import PREFIX
from bench.report import progress
from kvpool.client import Client
from kvpool.client.cli.launch.children import ChildSpec, Supervisor
from kvpool.client.cli.launch.cluster import MANAGER_NAME, Cluster, ClusterSpec, free_port

QUIET_SECONDS = 0.5
"""After a batch, until the last Free has been counted."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What one batch took and did."""

    seconds: float
    """From the first request sent to the last token received."""
    cpu_seconds: float
    """Of client, manager and worker together, until the last Free."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_forwarded_tokens: int
    """Σ(prompt − cached + generated − 1): what must be computed if nothing is computed twice."""
    first_token_seconds: float
    """Median over requests, from the start of the batch."""
    step_seconds: float
    """Median time between two tokens of a request: one decode step of the whole batch."""
    rpcs: dict[str, int]
    """RPCs that the manager answered, by kind, heartbeats left out."""


@dataclass(frozen=True)
class _CountedSpec(ClusterSpec):
    """A cluster whose manager counts RPCs and whose worker logs JSON."""

    worker_environment: Mapping[str, str] = field(default_factory=dict)

    def children(self, environment: Mapping[str, str] = os.environ) -> list[ChildSpec]:
        manager, worker = super().children(environment)
        command = list(manager.command)
        command[command.index("-m") + 1] = "bench.counting_manager"
        variables = {**worker.environment, **self.worker_environment}
        return [replace(manager, command=command), replace(worker, environment=variables)]


class OurCluster:
    """Use it as `async with`; afterwards `worker_totals` holds what the worker logged when it stopped."""

    def __init__(self, worker_arguments: Sequence[str], worker_environment: Mapping[str, str]) -> None:
        self.worker_totals: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="kvpool-bench-")
        self._rpcs: Counter[str] = Counter()
        self._spec = _CountedSpec(
            port=free_port(),
            state_dir=Path(self._folder.name),
            worker_arguments=(*worker_arguments, "--log-format", "json"),
            worker_environment=worker_environment,
        )
        self._supervisor = Supervisor(self._on_line, last=MANAGER_NAME)
        self._client = Client(self._spec.address)

    @property
    def address(self) -> str:
        """host:port of its manager."""
        return self._spec.address

    async def __aenter__(self) -> Self:
        await self._supervisor.__aenter__()
        try:
            await Cluster(self._spec, self._supervisor).start(lambda line: None)
            await self._client.model()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.close()
        await self._supervisor.__aexit__(kind, error, traceback)
        self._folder.cleanup()

    def _on_line(self, name: str, line: str) -> None:
        if line.startswith(PREFIX):
            self._rpcs[line.removeprefix(PREFIX)] += 1
            return
        try:
            logged = json.loads(line)
        except ValueError:
            if name != MANAGER_NAME:
                print(f"{name}: {line}", file=sys.stderr)
            return
        if logged.get("event") == "stopped":
            self.worker_totals = logged
        elif logged.get("level") in ("warning", "error"):
            progress(f"{name}: {line}")

    async def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> BatchResult:
        """Send all prompts at once; returns when the last has ended and its blocks are freed."""
        self._rpcs.clear()
        cpu_before = self._cpu_seconds()
        began = time.perf_counter()
        streams = await asyncio.gather(*(self._stream(prompt, max_new_tokens) for prompt in prompts))
        seconds = time.perf_counter() - began
        await asyncio.sleep(QUIET_SECONDS)
        completions = [completion for completion, _ in streams]
        num_prompt = sum(completion.num_prompt_tokens for completion in completions)
        num_cached = sum(completion.num_cached_tokens for completion in completions)
        num_generated = sum(len(completion.token_ids) for completion in completions)
        gaps = [later - earlier for _, times in streams for earlier, later in itertools.pairwise(times)]
        rpcs = {kind: count for kind, count in sorted(self._rpcs.items()) if kind != "KeepAlive"}
        return BatchResult(
            seconds=seconds,
            cpu_seconds=self._cpu_seconds() - cpu_before,
            num_prompt_tokens=num_prompt,
            num_cached_tokens=num_cached,
            num_generated_tokens=num_generated,
            num_forwarded_tokens=num_prompt - num_cached + num_generated - len(completions),
            first_token_seconds=statistics.median(times[0] for _, times in streams) - began,
            step_seconds=statistics.median(gaps),
            rpcs=rpcs,
        )

    def _cpu_seconds(self) -> float:
        """CPU time of this process, which is the client, and of its services so far."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # ended meanwhile
                # Behind the name, which may contain anything: state, ppid, …; 11 and 12 are utime and stime.
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid() and _is_service((stat.parent / "cmdline").read_bytes()):
                    ticks += int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

    async def _stream(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[Any, list[float]]:
        """The answer, and when each chunk of it with tokens came."""
        async with self._client.generate(prompt, max_tokens=max_new_tokens, ignore_eos=True) as stream:
            times = [time.perf_counter() async for chunk in stream if chunk.token_ids]
            return await stream.collect(), times


def _is_service(command_line: bytes) -> bool:
    return b"bench.counting_manager" in command_line or b"kvpool.worker_service" in command_line
