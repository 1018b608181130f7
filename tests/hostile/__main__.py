"""Hostile peers: everything that no peer may break, done to a real cluster beside a good client; twice, in some minutes.

python -m tests.hostile [--only NAME ...] [--messages N] [--rounds N] [--seed N] [--json] [--write]

Mutated messages over every RPC, malformed, idle, reset and unread connections, oversize messages, and the known attacks one by one.
The exit status is 1 if a process ends, `check` finds something, the good client gets a wrong answer, none, or one too late, memory
grows from round to round, or a process logs too much. All traffic stays on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.report import facts
from tests.hostile.campaign import Result, Settings, campaign
from tests.hostile.judge import CALM, Part
from tests.telling import tell_result, told

PAGE: Final = Path(__file__).parents[2] / "docs" / "BENCHMARKS.md"
BEGIN: Final = "<!-- hostile: begin (written by `python -m tests.hostile --write`) -->"
END: Final = "<!-- hostile: end -->"
COUNTS: Final = ("messages", "malformed", "idle", "rounds")
"""Messages, connections of two kinds, and rounds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if anything was violated."""
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m tests.hostile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts whose name contains one of these")
    for name in COUNTS:
        default = getattr(defaults, f"num_{name}")
        parser.add_argument(f"--{name}", type=int, default=default, help="(default %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=defaults.seed, help="of everything that is drawn (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--write", action="store_true", help="put a summary into docs/BENCHMARKS.md")
    chosen = parser.parse_args(arguments)
    counts = {f"num_{name}": getattr(chosen, name) for name in COUNTS}
    if min(counts.values()) < 0 or chosen.rounds < 1:
        parser.error("no count is negative, and there is at least one round")
    torch.set_num_threads(1)
    settings = Settings(only=tuple(chosen.only), seed=chosen.seed, **counts)
    with tempfile.TemporaryDirectory(prefix="kvpool-hostile-") as folder:
        result = _run(settings, Path(folder))
    around = facts("kvpool", "torch", "grpcio", "protobuf")
    if chosen.write:
        _write(_markdown(result, around))
    return tell_result(result, around, show, as_json=chosen.json)


def _run(settings: Settings, folder: Path) -> Result:
    with told("starting", is_worth_a_line=lambda done, of: done % 1000 == 0 or done == of) as progress:
        return asyncio.run(campaign(settings, folder, progress))


def _cells(round_number: int, part: Part) -> list[str]:
    times = (f"{part.quantile(share) * 1000:.0f} ms" for share in (0.5, 0.99, 1.0))
    lines = str(max(part.num_lines.values(), default=0))
    return [str(round_number), part.name, f"{part.seconds:.1f} s", str(len(part.call_seconds)), *times, lines]


_COLUMNS: Final = ("round", "part", "took", "good calls", "p50", "p99", "longest", "log lines")


def show(result: Result, console: Console) -> None:
    table = Table(*_COLUMNS, "outcome", box=None, pad_edge=False)
    for number, parts in enumerate(result.rounds, 1):
        for part in parts:
            # As text: names of attacks look like markup.
            cells = [Text(cell) for cell in _cells(number, part)]
            table.add_row(*cells, Text("; ".join(part.problems) or part.said, overflow="fold"))
    console.print(table)
    for line in _memory_lines(result):
        console.print(line)
    if result.num_rebuilt:
        console.print(f"{result.num_rebuilt} attacks left a cluster that had to be replaced")


def _memory_lines(result: Result) -> Iterator[str]:
    """What each process took, a line each."""
    for name in result.memory[0]:
        sizes = ", then ".join(f"{after.get(name, 0) / 2**20:.0f}" for after in result.memory)
        yield f"{name}: {sizes} MiB after each round; at most {result.most_lines.get(name, 0)} log lines in a minute"


def _worst(parts: Sequence[Part], share: float) -> str:
    part = max(parts, key=lambda part: part.quantile(share))
    return f"{part.quantile(share) * 1000:.0f} ms, {part.name}"


def _markdown(result: Result, around: dict[str, object]) -> str:
    rows = ["| round | parts | good calls | p99 when calm | worst p99 | longest |", "|---" * 6 + "|"]
    for number, parts in enumerate(result.rounds, 1):
        calm = next((part.quantile(0.99) for part in parts if part.name == CALM), 0.0)
        num_calls = sum(len(part.call_seconds) for part in parts)
        worst = f"{_worst(parts, 0.99)} | {_worst(parts, 1.0)}"
        rows.append(f"| {number} | {len(parts)} | {num_calls} | {calm * 1000:.0f} ms | {worst} |")
    rows.append("")
    rows += [f"* {line}." for line in _memory_lines(result)]
    rows.append(f"* {len(result.violations)} violations. {around['date']}, load {around['load_1min']}.")
    return "\n".join(rows)


def _write(table: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    PAGE.write_text(f"{before}\n{table}\n{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
