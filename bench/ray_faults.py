"""How soon processes are back on Ray: after a kill of a worker, of the manager, and of the node of both.

python -m bench.ray_faults [--runs N] [--json]

Needs the extra [ray]. Three Ray nodes on this machine: a head that has room for nothing, and two others; a manager without a
shared disk, two workers of a tiny random model. Each fault once in a run, on a new cluster. Seconds from the fault until the
manager lists both workers, those that were killed as new processes. Nothing else runs; that streams continue meanwhile is what
tests/on_ray looks at.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from rich.table import Table

from bench.report import command_line, facts, print_table, progress
from kvpool.client import Client, ClientConfig, KvpoolError
from tests.live.workload import TINY, Model
from tests.on_ray.nodes import Nodes, flags

WORKERS = ("worker-0", "worker-1")
POLL_SECONDS = 0.02
LONGEST_SECONDS = 120.0


async def sessions(managers: str) -> dict[str, int]:
    """The live workers and their incarnations; empty while no manager answers."""
    config = ClientConfig(manager=managers, first_contact=0.2, unary_timeout=0.5)
    async with Client(config=config) as client:
        try:
            return {worker.worker_id: worker.incarnation for worker in (await client.describe(timeout=0.5)).workers}
        except KvpoolError:
            return {}


async def until_served(managers: str, old: dict[str, int], replaced: set[str]) -> float:
    """Wait until all workers are listed, these as new processes; returns the time then."""
    async with asyncio.timeout(LONGEST_SECONDS):
        while True:
            now = await sessions(managers)
            if now.keys() == set(WORKERS) and all(now[name] != old[name] for name in replaced):
                return time.monotonic()
            await asyncio.sleep(POLL_SECONDS)


def measure(model: Model, folder: Path) -> dict[str, float]:
    """Seconds of each fault, on one cluster."""
    nodes = Nodes(folder)
    found: dict[str, float] = {}
    try:
        for _ in range(2):
            nodes.add(num_cpus=4)
        nodes.kvpool("up", "--detach", *flags(model, workers=2))
        services = nodes.until_all_run()
        managers = services["manager-0"].address
        assert managers is not None
        before = asyncio.run(sessions(managers))
        for _ in range(2):  # the first start of a process of each kind has to read files
            began = services["worker-0"].kill()
            found["worker killed"] = asyncio.run(until_served(managers, before, {"worker-0"})) - began
            services = nodes.until_all_run()
            before = asyncio.run(sessions(managers))
        began = services["manager-0"].kill()
        time.sleep(POLL_SECONDS)
        found["manager killed"] = asyncio.run(until_served(managers, before, set())) - began
        services = nodes.until_all_run()
        lost = services["manager-0"].node
        assert lost is not None
        gone = {name for name in WORKERS if services[name].node == lost}
        began = nodes.lose(lost)
        found["node of the manager and a worker lost"] = asyncio.run(until_served(managers, before, gone)) - began
    finally:
        nodes.close()
    return found


def main() -> None:
    arguments = command_line(__doc__, runs=3, of="clusters").parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="kvpool-ray-") as temporary:
        model = Model.make(TINY, Path(temporary))
        for run in range(arguments.runs):
            progress(f"cluster {run + 1} of {arguments.runs}")
            folder = Path(temporary) / str(run)
            folder.mkdir()
            for fault, seconds in measure(model, folder).items():
                found.setdefault(fault, []).append(seconds)
    if arguments.json:
        print(json.dumps({"seconds": found, "facts": facts("grpcio", "ray", "torch")}))
        return
    table = Table("until the manager lists both workers", box=None, pad_edge=False)
    for column in ("least, s", "median, s", "most, s"):
        table.add_column(column, justify="right")
    for fault, took in found.items():
        table.add_row(fault, *(f"{seconds:.2f}" for seconds in (min(took), statistics.median(took), max(took))))
    print_table(table)


if __name__ == "__main__":
    main()
