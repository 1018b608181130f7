"""The manager's core with millions of blocks: cost of allocation, memory, and how long other calls wait.

python -m bench.manager_scale [--blocks N] [--blocks-large N] [--only NAME ...] [--runs N] [--json]

Without a peer: the figures are compared with the targets in docs/BENCHMARKS.md. Blocks have 16 tokens. Each measurement runs in a
process of its own, like the manager without the cyclic collector. Ratios and costs are CPU time; a pause is given in wall time,
which other calls wait, and in CPU time, which other programs disturb least.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

from rich.table import Table

from bench import busy_workers
from bench.replay import FINGERPRINT, registration
from bench.report import command_line, facts, print_table, progress
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    Granted,
    Registration,
    Root,
    SequenceKey,
    SequenceUpdate,
    Uplink,
    WorkerLoad,
)
from kvpool.cache_service.worker_codec import decode_report, decode_uplink
from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache.ledger import BlockLedger, Content
from kvpool.worker_service.cache.report import Report

BLOCK_SIZE: Final = 16
NUM_WORKERS: Final = 64
MANY_WORKERS: Final = 1000
BUSY_WORKERS: Final = (10, 20, 25, 30)
LOAD_SECONDS: Final = 8.0
CHAIN_BLOCKS: Final = 32
"""Blocks of a request: 512 tokens."""
REPORTED_BLOCKS: Final = 100_000
LEAST_BLOCKS: Final = 20_000
"""With fewer, a worker has no room for both prompts of `route`."""
SMALL_BLOCKS: Final = 10_000
"""The reference of `allocation`."""


class Pause(NamedTuple):
    """The longest of many slices, in seconds."""

    wall: float
    cpu: float
    num_slices: int


class Fleet:
    """A manager and its workers."""

    def __init__(self, num_workers: int, blocks_per_worker: int) -> None:
        self.manager = CacheManager(1)
        self.sessions = [
            self.manager.register(_registration(f"w{index}", blocks_per_worker), 0.0).session
            for index in range(num_workers)
        ]
        self._call_no = 0
        self._num_prompts = 0

    def prompt(self, num_blocks: int) -> bytes:
        """Tokens of a prompt that shares no prefix with others."""
        self._num_prompts += 1
        first = array("I", [self._num_prompts])
        return (first + array("I", range(1, num_blocks * BLOCK_SIZE))).tobytes()

    def allocate(self, worker: int, tokens: bytes) -> SequenceKey:
        """One request arrives."""
        self._call_no += 1
        key = SequenceKey(str(self._call_no), 1, 0)
        item = AllocateItem(key, Root(FINGERPRINT), tokens, 1, True)
        outcomes, _ = self.manager.allocate(Uplink(self.sessions[worker], self._call_no), [item])
        assert isinstance(outcomes[0], Granted), outcomes
        return key

    def free(self, worker: int, key: SequenceKey, num_tokens: int) -> None:
        """It ends with all tokens computed: its blocks stay cached."""
        self._call_no += 1
        self.manager.free(Uplink(self.sessions[worker], self._call_no), [SequenceUpdate(key, 0, b"", num_tokens)])

    def serve(self, worker: int, num_blocks: int) -> None:
        """A whole request with a prompt of its own."""
        tokens = self.prompt(num_blocks)
        self.free(worker, self.allocate(worker, tokens), len(tokens) // 4)

    def fill(self, worker: int, num_blocks: int) -> None:
        """Cache blocks until the pool has no free ones."""
        (session,) = [session for session in self.manager.sessions if session.number == self.sessions[worker]]
        while session.pools[0].counts().free >= num_blocks:
            self.serve(worker, num_blocks)


def _registration(worker_id: str, num_blocks: int) -> Registration:
    return registration(worker_id, BLOCK_SIZE, num_blocks + 1)


def longest(slices: Iterator[Callable[[], object]]) -> Pause:
    """Run all slices; returns the longest times."""
    wall = cpu = 0.0
    count = 0
    for run in slices:
        cpu_began, began = time.thread_time(), time.perf_counter()
        run()
        wall = max(wall, time.perf_counter() - began)
        cpu = max(cpu, time.thread_time() - cpu_began)
        count += 1
    return Pause(wall, cpu, count)


def _until_done(step: Callable[[], bool]) -> Iterator[Callable[[], object]]:
    more = True

    def one() -> None:
        nonlocal more
        more = step()

    while more:
        yield one


# -- what is measured


def allocation(num_blocks: int) -> dict[str, Any]:
    """CPU time of a request's Allocate and Free in pools full of cached blocks, so that each evicts others."""
    fleet = Fleet(NUM_WORKERS, num_blocks // NUM_WORKERS)
    for worker in range(NUM_WORKERS):
        fleet.fill(worker, CHAIN_BLOCKS)
    costs = []
    for _ in range(9):
        began = time.thread_time()
        for index in range(2048):
            fleet.serve(index % NUM_WORKERS, CHAIN_BLOCKS)
        costs.append((time.thread_time() - began) / 2048)
    return {"seconds_per_request": statistics.median(costs), "num_nodes": fleet.manager.num_prefix_nodes}


def memory(num_blocks: int) -> dict[str, Any]:
    """Bytes per free block, as allocated by Python, and per cached block, by the growth of the process."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    fleet = Fleet(1, num_blocks)
    free = (tracemalloc.get_traced_memory()[0] - before) / num_blocks
    tracemalloc.stop()
    del fleet
    gc.collect()
    resident = _resident_bytes()
    fleet = Fleet(1, num_blocks)
    fleet.fill(0, CHAIN_BLOCKS)
    cached = (_resident_bytes() - resident) / fleet.manager.sessions[0].pools[0].counts().cached
    return {"bytes_per_free_block": free, "bytes_per_cached_block": cached}


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def register(num_blocks: int) -> dict[str, Any]:
    """The Register of a large pool."""
    manager = CacheManager(1)
    return {"pause": longest(iter([lambda: manager.register(_registration("w", num_blocks), 0.0)]))}


def report(num_blocks: int) -> dict[str, Any]:
    """A worker reports this number of cached blocks, at most 100,000, to a new manager: the time of each part from its bytes on,
    which other calls wait for, and of all."""
    count = min(num_blocks, REPORTED_BLOCKS)
    ledger = BlockLedger(count + 1)
    root = common_pb2.Root(model_fingerprint=FINGERPRINT)
    parent: Content | None = None
    for block in range(1, count + 1):
        ledger.accept_grant(block, block)
        ledger.use(block)
        tokens = array("I", range(block, block + BLOCK_SIZE)).tobytes()
        parent = Content(parent if block % CHAIN_BLOCKS else None, root, tokens)
        ledger.complete(block, parent)
        ledger.drop(block)
    snapshot = Report((ledger,), [], [[]])
    manager = CacheManager(1)
    introduction = _registration("w", count)._replace(holds_state=True)
    session = manager.register(introduction, 0.0).session
    parts: list[bytes] = []
    while True:
        request = cache_pb2.ReportRequest()
        request.CopyFrom(snapshot.part)
        request.uplink.session, request.uplink.call_no = session, len(parts) + 1
        parts.append(request.SerializeToString())
        if snapshot.next_part():
            break

    def apply(data: bytes) -> None:
        request = cache_pb2.ReportRequest.FromString(data)
        manager.report(decode_uplink(request), decode_report(request))

    began, cpu_began = time.perf_counter(), time.thread_time()
    pause = longest(partial(apply, data) for data in parts)
    seconds, cpu = time.perf_counter() - began, time.thread_time() - cpu_began
    assert manager.sessions[0].pools[0].counts().cached == count
    return {"pause": pause, "seconds": seconds, "cpu": cpu}


def fencing(num_blocks: int) -> dict[str, Any]:
    """A worker with this number of cached blocks leaves: the longest slice of the sweep, which other calls wait for."""
    found = {}
    for chain in (CHAIN_BLOCKS, 1024, min(32_768, num_blocks)):
        fleet = Fleet(1, num_blocks)
        fleet.fill(0, chain)
        fleet.manager.deregister(fleet.sessions[0])
        found[f"{chain:,}"] = {"pause": longest(_until_done(fleet.manager.sweep))}
        assert fleet.manager.num_prefix_nodes == 0
    return {"cases": found}


def route(num_blocks: int) -> dict[str, Any]:
    """Route of 2,000 tokens; one worker, or all, have the first 1,984."""
    num_route_blocks = 125
    fleet = Fleet(NUM_WORKERS, num_blocks // NUM_WORKERS)
    for worker in range(NUM_WORKERS):
        fleet.fill(worker, CHAIN_BLOCKS)
    alone, everywhere = fleet.prompt(num_route_blocks), fleet.prompt(num_route_blocks)
    for worker in range(NUM_WORKERS):
        fleet.free(worker, fleet.allocate(worker, everywhere), num_route_blocks * BLOCK_SIZE)
    fleet.free(7, fleet.allocate(7, alone), num_route_blocks * BLOCK_SIZE)
    found: dict[str, Any] = {"num_nodes": fleet.manager.num_prefix_nodes}
    for name, tokens, workers in (("cached_by_one", alone, 1), ("cached_by_all", everywhere, NUM_WORKERS)):
        ranked = fleet.manager.route(Root(FINGERPRINT), tokens)
        assert sum(worker.num_cached_tokens == 1984 for worker in ranked) == workers
        seconds = []
        for _ in range(500):
            began = time.perf_counter()
            fleet.manager.route(Root(FINGERPRINT), tokens)
            seconds.append(time.perf_counter() - began)
        found[name] = statistics.median(seconds)
    found["of_many"] = _route_of_many()
    return found


def _route_of_many() -> float:
    """The best three of 1,000 workers for a prompt of 1,000 tokens that ten of them hold. Between two Routes five workers have
    another load, as is usual."""
    fleet = Fleet(MANY_WORKERS, 256)
    prompt = fleet.prompt(63)
    for worker in range(10):
        fleet.free(worker, fleet.allocate(worker, prompt), 63 * BLOCK_SIZE)
    rng = random.Random(1)
    seconds = []
    for _ in range(500):
        for session in rng.sample(fleet.sessions, 5):
            load = WorkerLoad(num_running=rng.randrange(40), num_uncomputed_tokens=rng.randrange(3000))
            fleet.manager.keep_alive(session, 0, load, 0.0)
        began = time.perf_counter()
        ranked = fleet.manager.route(Root(FINGERPRINT), prompt[: 1000 * 4], 3)
        seconds.append(time.perf_counter() - began)
        assert len(ranked) == 3
    return statistics.median(seconds)


def check(num_blocks: int) -> dict[str, Any]:
    """An audit in slices of a pool in long chains, of one in short ones, and of 4,096 sequences with tables of 2,100 blocks."""
    found = {}
    for name in ("chains of 1,024", f"chains of {CHAIN_BLOCKS}", "4,096 long sequences"):
        fleet = Fleet(1, num_blocks)
        if name == "4,096 long sequences":
            shared = fleet.prompt(2000)
            fleet.free(0, fleet.allocate(0, shared), 2000 * BLOCK_SIZE)
            for _ in range(4096):
                fleet.allocate(0, shared + fleet.prompt(min(100, num_blocks // 8192)))
        else:
            fleet.fill(0, 1024 if "1,024" in name else CHAIN_BLOCKS)
        began = time.thread_time()
        audit = fleet.manager.begin_audit()
        pause = longest(_until_done(audit.step))
        audit.close()
        assert not audit.result().violations
        found[name] = {"pause": pause, "seconds": time.thread_time() - began}
    return {"cases": found}


def load(_: int) -> dict[str, Any]:
    """Busy workers over gRPC, in steps: the calls of a second, how long they take, and what they cost the manager."""
    return {"cases": {str(count): asyncio.run(busy_workers.measure(count, LOAD_SECONDS)) for count in BUSY_WORKERS}}


MEASUREMENTS: Final[dict[str, Callable[[int], dict[str, Any]]]] = {
    "allocation": allocation,
    "memory": memory,
    "register": register,
    "report": report,
    "fencing": fencing,
    "route": route,
    "check": check,
    "load": load,
}


class Figure(NamedTuple):
    """One figure, its target, and the value of each run."""

    name: str
    unit: str
    wanted: float | None
    found: list[float]

    @property
    def median(self) -> float:
        """The middle run."""
        return statistics.median(self.found)


def measure(name: str, num_blocks: int, runs: int) -> list[dict[str, Any]]:
    """One measurement, each run in a process of its own."""
    results = []
    for run in range(runs):
        progress(f"{name}, {num_blocks:,} blocks, run {run + 1} of {runs}")
        command = [sys.executable, "-m", "bench.manager_scale", "--child", name, "--blocks", str(num_blocks)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results.append(json.loads(done.stdout))
    return results


def figures(chosen: list[str], num_blocks: int, num_blocks_large: int, runs: int) -> list[Figure]:
    """The figures of the chosen measurements."""
    found: list[Figure] = []

    def add(name: str, unit: str, wanted: float | None, values: list[float]) -> None:
        found.append(Figure(name, unit, wanted, values))

    if "allocation" in chosen:
        small, large = (measure("allocation", count, runs) for count in (SMALL_BLOCKS, num_blocks_large))
        costs = [[run["seconds_per_request"] * 1e6 for run in results] for results in (small, large)]
        for count, values in zip((SMALL_BLOCKS, num_blocks_large), costs, strict=True):
            add(f"Allocate and Free of 512 tokens, {count:,} cached blocks, 64 workers", "µs CPU", None, values)
        ratios = [b / a for a, b in zip(*costs, strict=True)]
        add("  ratio of the two", "x", 1.3, ratios)
    if "memory" in chosen:
        results = measure("memory", num_blocks, runs)
        add("memory per free block", "bytes", 200, [run["bytes_per_free_block"] for run in results])
        add("memory per cached block", "bytes", 400, [run["bytes_per_cached_block"] for run in results])
    if "register" in chosen:
        add_pause(found, f"Register of {num_blocks:,} blocks", 20, measure("register", num_blocks, runs))
    if "report" in chosen:
        results = measure("report", num_blocks, runs)
        count = min(num_blocks, REPORTED_BLOCKS)
        add_pause(found, f"Report of {count:,} cached blocks: a part", 20, results)
        add("  the whole report, wall time", "s", 0.5, [run["seconds"] for run in results])
        add("  the same in CPU time", "s CPU", None, [run["cpu"] for run in results])
    if "fencing" in chosen:
        for chain, results in _by_case(measure("fencing", num_blocks, runs)):
            add_pause(found, f"fencing {num_blocks:,} cached blocks in chains of {chain}: a slice", 20, results)
    if "route" in chosen:
        results = measure("route", num_blocks, runs)
        for name in ("cached_by_one", "cached_by_all"):
            label = f"Route of 2,000 tokens, 64 workers, {num_blocks:,} nodes, {name.replace('_', ' ')}"
            add(label, "ms", 0.2, [run[name] * 1e3 for run in results])
        label = f"Route of 1,000 tokens, the best 3 of {MANY_WORKERS:,} workers, cached by ten"
        add(label, "ms", 0.1, [run["of_many"] * 1e3 for run in results])
    if "check" in chosen:
        for case, results in _by_case(measure("check", num_blocks, runs)):
            add_pause(found, f"Check of {num_blocks:,} blocks, {case}: a slice", 5, results)
            add("  the whole audit", "s CPU", None, [run["seconds"] for run in results])
    if "load" in chosen:
        for number, results in _by_case(measure("load", num_blocks, runs)):
            label = f"{number} busy workers: a call, the 99th of a hundred"
            add(label, "ms", busy_workers.MOST_P99_SECONDS * 1e3, [run["p99"] * 1e3 for run in results])
            add("  the manager", "cores", None, [run["manager_cores"] for run in results])
    return found


def _by_case(runs: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The results of the runs, by case."""
    for case in runs[0]["cases"]:
        yield case, [run["cases"][case] for run in runs]


def add_pause(found: list[Figure], name: str, wanted_ms: float, results: list[dict[str, Any]]) -> None:
    """The longest pause of a run, in CPU and in wall time; the target is for CPU time."""
    pauses = [Pause(*run["pause"]) for run in results]
    found.append(Figure(f"{name}, longest", "ms CPU", wanted_ms, [pause.cpu * 1e3 for pause in pauses]))
    found.append(Figure("  the same in wall time", "ms", None, [pause.wall * 1e3 for pause in pauses]))


def show(found: list[Figure]) -> None:
    """Print a table."""
    table = Table(box=None, pad_edge=False)
    table.add_column("measured")
    for column in ("median", "least", "most", "wanted at most"):
        table.add_column(column, justify="right")
    table.add_column("unit")
    for figure in found:
        values = (figure.median, min(figure.found), max(figure.found))
        wanted = "" if figure.wanted is None else f"{figure.wanted:g}"
        missed = figure.wanted is not None and figure.median > figure.wanted
        style = "bold red" if missed else None
        table.add_row(figure.name, *(f"{value:.3g}" for value in values), wanted, figure.unit, style=style)
    print_table(table)


def main() -> None:
    parser = command_line(__doc__, runs=3, of="runs of each measurement")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="of one pool, or of all for route")
    parser.add_argument("--blocks-large", type=int, default=10_000_000, help="of all workers, for allocation (4 GB)")
    parser.add_argument("--only", nargs="+", choices=list(MEASUREMENTS), default=list(MEASUREMENTS))
    parser.add_argument("--child", choices=list(MEASUREMENTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.blocks < LEAST_BLOCKS or arguments.blocks_large < SMALL_BLOCKS:
        parser.error(f"--blocks must be at least {LEAST_BLOCKS} and --blocks-large at least {SMALL_BLOCKS}")
    if arguments.child:
        gc.disable()
        print(json.dumps(MEASUREMENTS[arguments.child](arguments.blocks)))
        return
    found = figures(arguments.only, arguments.blocks, arguments.blocks_large, arguments.runs)
    if arguments.json:
        print(json.dumps({"figures": [figure._asdict() for figure in found], "facts": facts("xxhash")}))
    else:
        show(found)


if __name__ == "__main__":
    main()
