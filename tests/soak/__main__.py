"""A soak: a real cluster, full pools, random lengths, priorities and readers that leave; each token held against the right one.

python -m tests.soak [--minutes 20] [--readers 200] [--seed N] [--json]

Every answer is one that a plain loop over transformers' eager logits has given before. One worker's pool is always full, another's
so small that sequences are preempted often. The exit status is 1 if a token differs, something leaks, or a process grows.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.report import facts
from tests.soak.soak import Result, Settings, soak
from tests.telling import tell_result, told


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if anything was violated."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="(default 20)")
    parser.add_argument("--readers", type=int, default=200, help="streams at any time (default 200)")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    chosen = parser.parse_args(arguments)
    if chosen.minutes < 1 or chosen.readers < 1:
        parser.error("at least one minute and one reader")
    torch.set_num_threads(1)
    settings = Settings(60 * chosen.minutes, num_readers=chosen.readers, seed=chosen.seed)
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-soak-") as folder,
        told("starting", is_worth_a_line=lambda done, of: done % 60 < 1 or done == of) as progress,
    ):
        result = asyncio.run(soak(settings, Path(folder), progress))
    around = facts("kvpool", "torch", "transformers", "grpcio")
    return tell_result(result, around, show, as_json=chosen.json)


def show(result: Result, console: Console) -> None:
    totals = result.totals
    streams = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(totals.outcomes.items()))
    console.print(f"{result.seconds:.0f} s, {totals.num_tokens:,} tokens. Streams: {streams}")
    hits = totals.num_cached_tokens / max(1, totals.num_prompt_tokens)
    console.print(f"{totals.num_preemptions:,} preemptions; {hits:.1%} of the prompt tokens from the cache")
    for name, (median, least) in result.usage.items():
        console.print(f"Pool of {name}: {median:.1%} held at the median, {least:.1%} at least")
    console.print(f"{result.num_checks} audits")
    table = Table("process", "MB behind the warm-up", "at the end", "open files", "at the end")
    for grown in result.growth:
        sizes = (f"{size / 1e6:.1f}" for size in (grown.rss_before, grown.rss_after))
        table.add_row(grown.process, *sizes, str(grown.files_before), str(grown.files_after))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
