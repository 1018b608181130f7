"""Faults on a live cluster: a manager, workers and clients as real processes, and no text disturbed.

python -m tests.live [--kills 100] [--worker-faults 50] [--outage 10] [--model tiny|tiny-windows|tiny-states|smollm2] [--seed N]
                     [--json]

Manager and workers are killed, frozen and told to leave at random moments while streams run, half greedy and half drawn. Every
stream must tell exactly what the same request tells alone, and after every fault every law of the manager must hold.
The exit status is 1 if anything is otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.table import Table

from bench.report import facts
from tests.live.proof import Result, Settings, prove
from tests.live.workload import SMOLLM2, STATES, TINY, WINDOWS
from tests.telling import tell_result, told


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if anything was violated."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.live", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="kills of the manager (default 100)")
    parser.add_argument("--worker-faults", type=int, default=50, help="faults of workers (default 50)")
    parser.add_argument(
        "--outage", dest="outage_seconds", type=float, default=10.0, help="without a manager; 0: none (default 10)"
    )
    parser.add_argument("--reserve-seconds", type=float, default=15.0, help="reserve in the outage (default 15)")
    parser.add_argument(
        "--model", choices=(TINY, WINDOWS, STATES, SMOLLM2), default=TINY, help="in fp32 (default tiny, a random llama)"
    )
    parser.add_argument("--workers", type=int, default=3, help="(default 3)")
    parser.add_argument("--streams", type=int, default=9, help="that run at any time (default 9)")
    parser.add_argument("--requests", type=int, default=20, help="different ones (default 20)")
    parser.add_argument("--minutes", type=float, help="no fault begins later than that (default: all are done)")
    parser.add_argument("--seed", type=int, default=1, help="of moments, victims and prompts (default 1)")
    parser.add_argument("--logs", type=Path, help="an empty or new folder for the services' logs; they stay there")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    chosen = parser.parse_args(arguments)
    if min(chosen.kills, chosen.worker_faults, chosen.outage_seconds) < 0 or min(chosen.requests, chosen.streams) < 1:
        parser.error("counts must not be negative, and at least one stream of one request is needed")
    if chosen.workers < 2:
        parser.error("--workers must be at least 2: a stream whose worker dies needs another one")
    settings = Settings(**{name: value for name, value in vars(chosen).items() if name not in ("logs", "json")})
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvpool-live-") as temporary:
        folder = chosen.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with told("starting the cluster", MofNCompleteColumn()) as progress:
            result = asyncio.run(prove(settings, folder, progress))
    result.judge_times()
    around = {**facts("kvpool", "torch", "transformers", "grpcio"), "seconds": round(time.monotonic() - began)}
    return tell_result(result, around, show, as_json=chosen.json)


def show(result: Result, console: Console) -> None:
    streams = Table("", "faults", "streams", "tokens", "hit", "moved", title="Streams", title_justify="left")
    for phase in result.phases:
        counts = (phase.faults, phase.streams.num_streams, phase.streams.num_tokens, phase.hit, phase.streams.num_moved)
        streams.add_row(phase.name, *(f"{count:,}" for count in counts))
    console.print(streams)
    if result.recoveries:
        times = Table("from the kill of the manager until", "median", "worst", title="Recovery", title_justify="left")
        for what, name in (
            ("it serves again", "serves"),
            ("the first new Allocate is answered", "first_grant"),
            ("a new request of a client has its blocks", "client"),
            ("every worker has had one answered", "last_grant"),
            ("  CPU time of the new manager until then", "cpu"),
        ):
            seconds = [getattr(recovery, name) for recovery in result.recoveries]
            times.add_row(what, f"{statistics.median(seconds):.2f} s", f"{max(seconds):.2f} s")
        console.print(times)
    if any(result.worker_faults.values()):
        console.print("Workers: " + ", ".join(f"{count} {fault}" for fault, count in result.worker_faults.items()))
    if result.outages:
        outages = Table(
            *("manager", "seconds", "tokens", "gap, median", "gap, most", "reserve, least", "waits", "differ"),
            title="Outage",
            title_justify="left",
        )
        for outage in result.outages:
            outages.add_row(
                outage.away,
                f"{outage.seconds:.1f}",
                f"{outage.num_tokens:,}",
                *(f"{seconds * 1000:.1f} ms" for seconds in (outage.gap_median, outage.gap_most)),
                f"{outage.reserve_least:.1f} s",
                *(str(count) for count in (outage.num_waits, outage.num_differences)),
            )
        console.print(outages)
    for tie in result.ties:
        console.print(f"tie: {tie}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
