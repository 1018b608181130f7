"""A manager and its workers for a benchmark, each a process, and their counters."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from bench.report import progress
from kvpool.cli.launch.children import Children, ChildSpec
from kvpool.cli.launch.cluster import HOST, MANAGER_NAME, Cluster, ClusterSpec, free_port, require_free_port
from kvpool.client.errors import Unavailable
from kvpool.load.load import Stalled
from tests.scrape import Scrape, scrape

NOT_FOR_REQUESTS: Final = frozenset(
    {"Register", "KeepAlive", "Deregister", "Drain", "Describe", "DescribeBlock", "Explain", "Watch", "Check"}
)
"""RPCs to the manager that do not grow with the load: those of sessions, and those of observers."""
IDLE_SECONDS: Final = 60.0
"""For the manager to be notified of the end of every request."""
_IDLE_POLL_SECONDS: Final = 0.05


class Counts(NamedTuple):
    """Counters of manager and workers: since their start, or the increase between two moments."""

    rpcs: Counter[str]
    """RPCs that the manager answered, by method, without those of NOT_FOR_REQUESTS."""
    num_forwarded_tokens: int
    """Tokens that the workers' models computed."""
    num_decodes_that_waited: int
    """Decodes that skipped a step because their block had to be requested first."""

    def since(self, earlier: Counts) -> Counts:
        """The increase since an earlier moment."""
        return Counts(
            self.rpcs - earlier.rpcs,
            self.num_forwarded_tokens - earlier.num_forwarded_tokens,
            self.num_decodes_that_waited - earlier.num_decodes_that_waited,
        )

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return self._asdict()


@dataclass(frozen=True)
class _Spec(ClusterSpec):
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of all processes."""

    def children(self, environment: Mapping[str, str] = os.environ) -> list[ChildSpec]:
        children = super().children(environment)
        return [replace(child, environment={**child.environment, **self.environment}) for child in children]


class OurCluster:
    """Use it as `async with`, which starts it and waits until all processes serve. Warnings of the processes go to stderr."""

    def __init__(
        self,
        worker_arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        num_workers: int = 1,
    ) -> None:
        """`environment` is added to that of all processes; with num_workers=0 the manager is alone."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvpool-bench-")
        first_port = _free_ports(2 + num_workers)
        self._spec = _Spec(
            num_workers=num_workers,
            port=first_port,
            metrics_port=first_port + 1,
            state_dir=Path(self._folder.name),
            worker_arguments=tuple(worker_arguments),
            environment={
                "KVPOOL_MANAGER_LOG_LEVEL": "warning",
                "KVPOOL_WORKER_LOG_LEVEL": "warning",
                **(environment or {}),
            },
        )
        self._children = Children(lambda name, line: progress(f"{name}: {line}"), last=MANAGER_NAME)

    @property
    def address(self) -> str:
        """host:port of the manager."""
        return self._spec.address

    async def __aenter__(self) -> Self:
        await self._children.__aenter__()
        try:
            await Cluster(self._spec, self._children).start(lambda line: None)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._children.__aexit__(kind, error, traceback)
        self._folder.cleanup()

    async def counts(self) -> Counts:
        """The counters once no sequence is live: until then, calls that end requests are to come. Raises Stalled."""
        ends_at = time.monotonic() + IDLE_SECONDS
        while any((manager := await self._page(MANAGER_NAME)).labelled("kvpool_manager_sequences", "worker").values()):
            if time.monotonic() > ends_at:
                raise Stalled(f"sequences are live {IDLE_SECONDS:g} s after the last request of a run has ended")
            await asyncio.sleep(_IDLE_POLL_SECONDS)
        calls: Counter[str] = Counter()
        for (name, labels), value in manager.values.items():
            if name == "kvpool_manager_calls_total":
                calls[dict(labels)["method"]] += int(value)
        workers = [await self._page(name) for name in self._spec.worker_names]
        return Counts(
            Counter({method: number for method, number in calls.items() if method not in NOT_FOR_REQUESTS}),
            sum(int(page.value("kvpool_worker_step_tokens_sum")) for page in workers),
            sum(int(page.value("kvpool_worker_decodes_that_waited_for_a_call_total")) for page in workers),
        )

    async def manager_cpu_seconds(self) -> float:
        """User and system time of the manager so far."""
        return (await self._page(MANAGER_NAME)).value("process_cpu_seconds_total")

    async def _page(self, name: str) -> Scrape:
        return await scrape(self._spec.metrics_urls[name])


def _free_ports(number: int) -> int:
    """The first of `number` consecutive ports that are free now."""
    while True:
        first = free_port()
        with suppress(Unavailable, OverflowError):  # OverflowError: above port 65535
            for port in range(first, first + number):
                require_free_port(HOST, port)
            return first
