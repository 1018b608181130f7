"""How long nobody leads: from the end of the manager that leads to the first call that the next one answers.

python -m bench.takeover [--runs N] [--json]

Two managers with `--election file` on one machine, and a client that asks Describe again and again over the list of both. The one
that leads is ended by SIGKILL, then by SIGTERM; the other one takes over, and the first one is started again. For comparison the
same of one manager alone, which is killed and started again by its supervisor without a pause. Nobody is registered. Milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import time
from contextlib import aclosing
from typing import Final

from rich.table import Table

from bench.managers import ask_epoch, managers, until_another
from bench.report import command_line, facts, print_table, progress
from kvpool.process.manager_channel import ManagerChannel

SETTLED_SECONDS: Final = 1.0
"""Before each end: the other one stands by."""


async def measure(num_managers: int, number: int, num_runs: int) -> list[float]:
    """Milliseconds from the signal to the first answer under the next epoch."""
    found = []
    async with managers(num_managers) as running, aclosing(ManagerChannel(running.addresses)) as channel:
        for _ in range(num_runs):
            await asyncio.sleep(SETTLED_SECONDS)
            epoch = await ask_epoch(channel, 30.0)
            port = running.leader()
            began = time.perf_counter()
            running.end(port, number)
            restarting = None if num_managers > 1 else asyncio.create_task(running.restart(port))
            await until_another(channel, epoch)
            found.append((time.perf_counter() - began) * 1e3)
            await (running.restart(port) if restarting is None else restarting)
    return found


async def run(num_runs: int) -> dict[str, list[float]]:
    cases = {
        "two, SIGKILL": (2, signal.SIGKILL),
        "two, SIGTERM": (2, signal.SIGTERM),
        "one, SIGKILL and a restart": (1, signal.SIGKILL),
    }
    found = {}
    for name, (num_managers, number) in cases.items():
        progress(name)
        found[name] = await measure(num_managers, number, num_runs)
    return found


def main() -> None:
    arguments = command_line(__doc__, runs=10, of="ends of each kind").parse_args()
    found = asyncio.run(run(arguments.runs))
    if arguments.json:
        print(json.dumps({"milliseconds": found, "facts": facts("grpcio")}))
        return
    table = Table("managers", box=None, pad_edge=False)
    for column in ("least, ms", "median, ms", "most, ms", "ends"):
        table.add_column(column, justify="right")
    for name, milliseconds in found.items():
        table.add_row(
            name,
            f"{min(milliseconds):.0f}",
            f"{statistics.median(milliseconds):.0f}",
            f"{max(milliseconds):.0f}",
            str(len(milliseconds)),
        )
    print_table(table)


if __name__ == "__main__":
    main()
