"""How long the streams of many workers notice that the manager which leads has been killed.

python -m bench.takeover_load [--workers N] [--blocks N] [--runs N] [--json]

Workers without a model (bench.simulated_workers) have so many blocks each, half of them in live sequences, half cached. The manager
that leads gets a SIGKILL, the one that stands by takes over, and all workers report to it, over real gRPC on one machine: what the
workers compute for it competes with the manager for the same cores. Seconds from the kill.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import subprocess
import sys
import time
from contextlib import aclosing
from typing import Any, Final

from rich.table import Table

from bench.managers import ask_epoch, managers
from bench.report import command_line, cpu_seconds, facts, print_table, progress
from bench.simulated_workers import BLOCK_SIZE
from kvpool.process.manager_channel import ManagerChannel

NUM_SEQUENCES: Final = 64
"""Live ones of each worker; as many have ended."""
NUM_NEW: Final = 512
"""Tokens that a live one may generate: more than it has time for."""
STEP_SECONDS: Final = 0.5
"""Two tokens a second for each sequence: what the steps cost here, the workers' own machines would pay."""
SETTLED_SECONDS: Final = 4.0
OBSERVED_SECONDS: Final = 15.0


class _Workers:
    """A process of simulated workers."""

    def __init__(self, addresses: str, first: int, count: int, num_blocks: int) -> None:
        numbers = [str(first), str(count), str(num_blocks), str(STEP_SECONDS)]
        command = [sys.executable, "-m", "bench.simulated_workers", addresses, *numbers]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def ask(self, *command: Any) -> Any:
        """One command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(await asyncio.to_thread(self._read))

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


async def measure(num_workers: int, num_blocks: int, num_processes: int = 2) -> dict[str, Any]:
    """One takeover."""
    per_sequence = num_blocks // 2 // NUM_SEQUENCES
    num_tokens = per_sequence * BLOCK_SIZE - BLOCK_SIZE // 2
    async with managers(2) as running, aclosing(ManagerChannel(running.addresses)) as channel:
        await ask_epoch(channel, 30.0)
        share = num_workers // num_processes
        processes = [
            _Workers(running.addresses, index * share, share, num_blocks + NUM_NEW // BLOCK_SIZE * NUM_SEQUENCES)
            for index in range(num_processes)
        ]
        try:
            for command in (
                ("registered",),
                ("fill", NUM_SEQUENCES, num_tokens),
                ("begin", NUM_SEQUENCES, num_tokens, NUM_NEW),
            ):
                progress(f"{num_workers} workers: {command[0]}")
                await asyncio.gather(*(process.ask(*command) for process in processes))
            await asyncio.sleep(SETTLED_SECONDS)
            before = [await process.ask("result") for process in processes]
            for process in processes:
                await process.ask("mark")
            port = running.leader()
            killed_at = time.monotonic()
            running.end(port, signal.SIGKILL)
            await asyncio.sleep(1.0)
            pid = running.leader_pid()
            await asyncio.sleep(OBSERVED_SECONDS - 1.0)
            after = [await process.ask("result") for process in processes]
            return {
                "served": [at - killed_at for result in after for at in result["served_at"]],
                "complete": [at - killed_at for result in after for at in result["complete_at"]],
                "first": [at - killed_at for result in after for at in result["first_after"]],
                "gaps": [gap for result in after for gap in result["gaps"]],
                "used": [used for result in before for used in result["used"]],
                "manager_cpu": cpu_seconds(pid),
                "workers_cpu": sum(b["cpu"] - a["cpu"] for a, b in zip(before, after, strict=True)),
            }
        finally:
            for process in processes:
                process.close()


def main() -> None:
    parser = command_line(__doc__, runs=3, of="takeovers")
    parser.add_argument("--workers", type=int, default=64, help="(default 64)")
    parser.add_argument("--blocks", type=int, default=10_000, help="of each, half of them live (default 10000)")
    arguments = parser.parse_args()
    found = [asyncio.run(measure(arguments.workers, arguments.blocks)) for _ in range(arguments.runs)]
    if arguments.json:
        print(json.dumps({"seconds": found, "facts": facts("grpcio")}))
        return
    table = Table("from the kill until", box=None, pad_edge=False)
    for column in ("median, s", "worst, s", "of"):
        table.add_column(column, justify="right")
    names = {
        "served": "a worker is served again",
        "first": "a sequence has a token from then",
        "gaps": "longest time between two tokens of a sequence",
        "complete": "a worker's cache is known again",
    }
    for key, name in names.items():
        values = [value for one in found for value in one[key]]
        assert all(value > 0 for value in values), f"not within {OBSERVED_SECONDS} s: {name}"
        table.add_row(name, f"{statistics.median(values):.2f}", f"{max(values):.2f}", f"{len(values):,}")
    print_table(table)
    cpu = statistics.median(one["manager_cpu"] for one in found), statistics.median(one["workers_cpu"] for one in found)
    print(f"CPU of the new manager {cpu[0]:.1f} s, of all workers {cpu[1]:.1f} s in {OBSERVED_SECONDS:.0f} s")


if __name__ == "__main__":
    main()
