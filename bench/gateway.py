"""What the gateway costs: CPU time of one that serves many streams at a GPU's pace, and how much later the first token comes.

python -m bench.gateway [--streams 64] [--rate 50] [--seconds 15] [--prompts 100] [--runs 3] [--json [FILE]]

A manager, a worker with a tiny model whose steps begin at `rate` per second (bench.paced_worker), and a gateway, each a process.
*Streams*: `streams` answers at a time for `seconds`, of one token a step, over HTTP with one reader each; next to it the same
streams read by kvpool's own client in a process of its own, which has no HTTP. The figure is CPU time of the process (user and
system) over wall time, and for each token. *First token*: requests one at a time, in turn over HTTP and by the client, to a worker
that is idle; the difference of the medians is the gateway's.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from bench.report import command_line, cpu_seconds, facts, print_table, progress, report_as
from kvpool.cli.launch.children import Children, ChildSpec
from kvpool.cli.launch.cluster import HOST, MANAGER_NAME, Cluster, ClusterSpec, free_port
from kvpool.client import Client
from tests.cluster.models import make_endless_model

WARM_UP_SECONDS: Final = 2.0
PROMPT_TOKENS: Final = 64
_CLIENT_SIDE: Final = "--client-side"
_PATH: Final = "/v1/completions"
_PATIENCE_SECONDS: Final = 30.0
_REST_SECONDS: Final = 0.1
"""Before a request for its first token: no step of the request before is under way."""


@dataclass(frozen=True)
class _Spec(ClusterSpec):
    rate: float = 50.0

    def children(self, environment: Mapping[str, str] = os.environ) -> list[ChildSpec]:
        manager, *workers = super().children(environment)
        paced = []
        for worker in workers:
            command = [*worker.command]
            place = command.index("kvpool.worker_service")
            command[place : place + 1] = ["bench.paced_worker", str(self.rate)]
            paced.append(replace(worker, command=command))
        return [manager, *paced]


@dataclass
class Side:
    """The figures of one process that passes the streams on."""

    name: str
    cpu_share: list[float] = field(default_factory=list)
    """CPU time over wall time, for each run."""
    us_per_token: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)

    def add(self, cpu_seconds: float, wall_seconds: float, num_tokens: int) -> None:
        """The figures of one run."""
        self.cpu_share.append(cpu_seconds / wall_seconds)
        self.us_per_token.append(cpu_seconds / num_tokens * 1e6)
        self.tokens_per_s.append(num_tokens / wall_seconds)


class Reader:
    """Answers over HTTP/1.1: one connection each."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.num_tokens = 0

    async def read(self, num_tokens: int) -> float:
        """Read one answer; returns the seconds until its first token."""
        body = json.dumps(
            {
                "model": await self.model(),
                "prompt": prompt(),
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,  # an event for each token, also for one that has no text
            }
        ).encode()
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection(HOST, self._port)
        writer.write(
            f"POST {_PATH} HTTP/1.1\r\nHost: {HOST}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        first = 0.0
        try:
            async for line in reader:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - began
                    self.num_tokens += 1
                elif line.startswith(b"data: [DONE]"):
                    return first
        finally:
            writer.close()
        raise RuntimeError("the answer broke off: the gateway's log says why")

    async def model(self) -> str:
        """Name of the one model served."""
        if not hasattr(self, "_model"):
            reader, writer = await asyncio.open_connection(HOST, self._port)
            writer.write(f"GET /v1/models HTTP/1.1\r\nHost: {HOST}:{self._port}\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            self._model: str = json.loads(answer.partition(b"\r\n\r\n")[2])["data"][0]["id"]
        return self._model


_num_prompts = 0


def prompt() -> list[int]:
    """Token ids that no request had before: nothing of it is cached."""
    global _num_prompts
    _num_prompts += 1
    return [3 + (_num_prompts >> (3 * place)) % 8 for place in range(8)] + [3] * (PROMPT_TOKENS - 8)


async def client_streams(client: Client, num_streams: int, seconds: float, rate: float) -> int:
    """Read so many answers at a time by the client; returns the number of tokens."""

    async def one() -> int:
        answer = await client.generate(prompt(), max_tokens=round(seconds * rate), ignore_eos=True).collect()
        return len(answer.token_ids)

    return sum(await asyncio.gather(*(one() for _ in range(num_streams))))


async def client_side(manager: str, num_streams: int, seconds: float, rate: float) -> None:
    """The child that reads with kvpool's client: a line with CPU seconds, wall seconds and tokens."""
    async with Client(manager) as client:
        await client.generate(prompt(), max_tokens=4).collect()
        cpu, wall = time.process_time(), time.perf_counter()
        num_tokens = await client_streams(client, num_streams, seconds, rate)
        print(json.dumps([time.process_time() - cpu, time.perf_counter() - wall, num_tokens]))


@asynccontextmanager
async def running(rate: float) -> AsyncIterator[tuple[str, int, int]]:
    """A cluster and a gateway; gives the manager's address, and the gateway's port and pid."""
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        model = make_endless_model(Path(folder) / "model", tokenizer=True)
        arguments = ("--model", str(model.path), "--num-blocks", "16384", "--max-num-seqs", "256")
        state = Path(folder) / "state"
        spec = _Spec(port=free_port(), worker_arguments=arguments, state_dir=state, rate=rate)
        port = free_port()
        async with Children(lambda name, line: None, last=MANAGER_NAME) as children:
            await Cluster(spec, children).start(lambda line: None)
            command = [sys.executable, "-m", "kvpool.gateway", "--manager", spec.address, "--port", str(port)]
            await children.start(ChildSpec("gateway", command, {}))
            await _until_ready(port)
            yield spec.address, port, children.pids()["gateway"]


async def _until_ready(port: int) -> None:
    ends_at = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            await Reader(port).model()
        except (OSError, LookupError, ValueError):
            if time.monotonic() > ends_at:
                raise
            await asyncio.sleep(0.1)
        else:
            return


async def measure(num_streams: int, rate: float, seconds: float, num_prompts: int, num_runs: int) -> list[Side]:
    """The gateway's side and the client's, in turn."""
    gateway, client_alone = Side("gateway"), Side("kvpool's client")
    async with running(rate) as (manager, port, pid):
        reader = Reader(port)
        await asyncio.gather(*(reader.read(round(WARM_UP_SECONDS * rate)) for _ in range(num_streams)))
        for run in range(1, num_runs + 1):
            reader = Reader(port)
            await reader.model()
            cpu, wall = cpu_seconds(pid), time.perf_counter()
            await asyncio.gather(*(reader.read(round(seconds * rate)) for _ in range(num_streams)))
            gateway.add(cpu_seconds(pid) - cpu, time.perf_counter() - wall, reader.num_tokens)
            progress(f"run {run}: gateway {gateway.cpu_share[-1]:.2f} of a core")
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench.gateway", _CLIENT_SIDE, manager, str(num_streams), str(seconds), str(rate),
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, _ = await child.communicate()
            client_alone.add(*json.loads(out))
            progress(f"run {run}: client {client_alone.cpu_share[-1]:.2f} of a core")
        async with Client(manager) as client:
            for number in range(num_prompts + 10):
                reader = Reader(port)
                await reader.model()
                await asyncio.sleep(_REST_SECONDS)
                over_http = await reader.read(2)
                await asyncio.sleep(_REST_SECONDS)
                began = time.perf_counter()
                async with client.generate(prompt(), max_tokens=2, ignore_eos=True) as stream:
                    while not (await anext(stream)).token_ids:
                        pass  # the first chunk says that there are blocks
                    by_client = time.perf_counter() - began
                    await stream.collect()
                if number >= 10:
                    gateway.first_token_ms.append(over_http * 1000)
                    client_alone.first_token_ms.append(by_client * 1000)
    return [gateway, client_alone]


def show(sides: list[Side]) -> None:
    """A table."""
    table = Table("side", "of a core (least to most)", "us a token", "tokens/s", "first token (median)")
    for side in sides:
        table.add_row(
            side.name,
            f"{statistics.median(side.cpu_share):.2f} ({min(side.cpu_share):.2f} to {max(side.cpu_share):.2f})",
            f"{statistics.median(side.us_per_token):.0f}",
            f"{statistics.median(side.tokens_per_s):,.0f}",
            f"{statistics.median(side.first_token_ms):.1f} ms",
        )
    print_table(table)
    gateway, client = (statistics.median(side.first_token_ms) for side in sides)
    ratio = statistics.median(sides[0].us_per_token) / statistics.median(sides[1].us_per_token)
    print(f"gateway against client: {ratio:.2f}x the CPU time of a token; first token {gateway - client:+.1f} ms")


def main() -> None:
    """Run the benchmark, or its client's side."""
    if sys.argv[1:2] == [_CLIENT_SIDE]:
        manager, streams, seconds, rate = sys.argv[2:]
        asyncio.run(client_side(manager, int(streams), float(seconds), float(rate)))
        return
    parser = command_line(__doc__, runs=3, json_file=True)
    parser.add_argument("--streams", type=int, default=64, help="answers at a time (default 64)")
    parser.add_argument("--rate", type=float, default=50, help="tokens per second of each (default 50)")
    parser.add_argument("--seconds", type=float, default=15, help="length of an answer (default 15)")
    parser.add_argument("--prompts", type=int, default=100, help="requests for the first token (default 100)")
    given = parser.parse_args()
    sides = asyncio.run(measure(given.streams, given.rate, given.seconds, given.prompts, given.runs))
    found: dict[str, Any] = {"facts": facts(), "sides": [asdict(side) for side in sides]}
    report_as(given.json, found, lambda: show(sides))


if __name__ == "__main__":
    main()
