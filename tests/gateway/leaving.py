"""Readers over HTTP that go away in the middle of their answers, one after the other: what do they leave?

python -m tests.gateway.leaving [--readers 1000]

A cluster of one worker and a gateway, each a process. Each reader leaves in another way and at another moment: before its answer
begins, after some events, with its connection closed, reset, or half closed; some ask for several answers. After each one the time
passes until no block is held. The exit status is 1 if a law is broken, something is held in the end, or a process has grown.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import struct
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import MofNCompleteColumn

from tests.cluster.cluster import GATEWAY, HOST, Cluster
from tests.cluster.models import make_endless_model
from tests.gateway.serving import completion
from tests.soak.watch import Growth, Holding, growth
from tests.telling import Tell, tell_result, told
from tests.until import eventually

WORKER: Final = "worker-0"
WAYS: Final = ("close", "reset", "half")
_NO_LINGERING: Final = struct.pack("ii", 1, 0)
"""The socket is reset when it is closed."""


@dataclass
class Left:
    seconds: list[float] = field(default_factory=list)
    """From the leaving of each until nothing was held."""
    violations: list[str] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    """Empty for a few readers, which say nothing of it."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def leave(port: int, number: int) -> None:
    """One reader, which has gone at the end."""
    waits = number % 5 == 4  # for the whole answer, not for events
    asked = completion(
        prompt=f"reader {number % 7} of a long answer",
        max_tokens=900,
        n=1 + number % 3,
        ignore_eos=True,
        stream=not waits,
    )
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(asked)
    await writer.drain()
    if waits:
        await asyncio.sleep(0.02 * (number % 4))
    else:
        for _ in range(3 * (number % 4)):
            await reader.readline()
    way = WAYS[number % len(WAYS)]
    if way == "reset":
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
    elif way == "half":
        writer.write_eof()
        await asyncio.sleep(0.01)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def leaving(num_readers: int, folder: Path, tell: Tell) -> Left:
    """Do it. Raises AssertionError if blocks do not come back."""
    found = Left()
    model = make_endless_model(folder / "model", tokenizer=True)
    worker = {"model": model.path, "block_size": 4, "num_blocks": 4097, "step_seconds": 0.002}
    async with Cluster(folder) as cluster:
        await cluster.start({WORKER: worker})
        await cluster.start_gateway()
        port = int(cluster.address(GATEWAY).rpartition(":")[2])
        holdings: dict[str, list[Holding]] = {name: [] for name in cluster.processes}
        async with cluster.client() as client:

            async def nothing_is_held() -> bool:
                (worker,) = (await client.describe()).workers
                return not worker.num_sequences and not worker.counts[0].held

            for number in range(num_readers):
                await leave(port, number)
                gone_at = time.monotonic()
                await eventually(nothing_is_held, "all blocks come back", 60)
                found.seconds.append(time.monotonic() - gone_at)
                for name, process in cluster.processes.items():
                    holdings[name].append(Holding(number, process.resident_bytes, process.num_open_files))
                tell("readers", number + 1, num_readers)
            found.violations += map(str, (await client.check()).violations)
        if num_readers >= 200:
            found.growth = [growth(name, taken) for name, taken in holdings.items()]
            found.violations += [problem for one in found.growth for problem in one.problems]
        log = cluster.processes[GATEWAY].log
        found.violations += [line for line in log.splitlines() if "Traceback" in line or "failed" in line]
    return found


def show(left: Left, console: Console) -> None:
    middle, longest = (f"{1000 * seconds:.0f} ms" for seconds in (statistics.median(left.seconds), max(left.seconds)))
    console.print(f"{len(left.seconds):,} readers left; nothing was held after {middle} (median), {longest} (longest)")
    for one in left.growth:
        memory = f"{one.rss_before / 1e6:.1f} → {one.rss_after / 1e6:.1f} MB"
        console.print(f"{one.process}: {memory}, {one.files_before} → {one.files_after} open files")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, default=1000, help="(default 1000)")
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-leaving-") as folder,
        told("starting the cluster", MofNCompleteColumn(), is_worth_a_line=lambda done, of: done % 100 == 0) as tell,
    ):
        left = asyncio.run(leaving(chosen.readers, Path(folder), tell))
    return tell_result(left, {}, show, as_json=False)


if __name__ == "__main__":
    sys.exit(main())
