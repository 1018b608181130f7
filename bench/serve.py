"""kvpool's engine and cluster under load, against other engines for CPUs: SmolLM2-135M-Instruct, bfloat16.

python -m bench.serve [--runs N] [--workloads …] [--peers …] [--json [FILE]]

Each workload: a full-size warm-up on every side, then repetitions in turn, each with new prompts; warm means the same prompts
again. Every side has its own process and is driven by the same code: load. "kvpool engine" has no gRPC, like the peers:
compare it with them. "kvpool over gRPC" is a whole cluster, client included, with RPCs counted by the manager. A floor is the least
time by this machine's measured speed (bench.floors).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Final

from bench.agreement import Listener
from bench.floors import ModelSizes
from bench.machine_speed import CannotMeasure, MachineSpeed, measure_speed
from bench.piped_engine import EngineFailed, PipedEngine
from bench.report import command_line, facts, progress, report_as
from bench.serve_cases import MIXED, PLANS
from bench.serve_figures import Measured, Measurements, ratios_as_json, show
from bench.serve_peers import PEERS, Setup
from bench.serve_sides import OURS, SERVED, WAIT_POLICIES, Sides, require_installed
from kvpool.client.errors import KvpoolError
from kvpool.load.engine import EngineUnderLoad
from kvpool.load.kvpool_engine import KvpoolEngine
from kvpool.load.load import LoadObserver, run_load
from kvpool.load.plan import CacheCase, LoadPlan
from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from kvpool.worker_service.model.source.resolve import resolve_model

WORKLOADS: Final = (*PLANS, "mixed")
DEFAULT_PEERS: Final = ("vllm-cpu", "openvino-bf16", "openvino-int8", "transformers", "llama-cpp-q8", "llama-cpp-q4")
DTYPE: Final = "bfloat16"
STALL_SECONDS: Final = 300.0


async def measure(arguments: argparse.Namespace, measured: Measurements, setup: dict[str, Any]) -> None:
    """All workloads on all sides, in turn. Fills `measured` repetition by repetition, and `setup` with settings and facts."""
    task = asyncio.current_task()
    assert task is not None
    # As on Ctrl-C: the sides are processes that must be ended.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    require_installed(arguments.peers)
    environment = {"OMP_NUM_THREADS": str(arguments.threads), **WAIT_POLICIES[arguments.wait_policy]}
    setup["settings"] = {"environment": environment, "worker": arguments.worker_argument, "seed": arguments.seed}
    setup["facts"] = facts("kvpool", "torch", "transformers", "grpcio")
    async with AsyncExitStack() as stack:
        folder = resolve_model("smollm2", default_cache_dir(), progress).path
        sides = Sides(stack, Setup(folder, arguments.threads, environment))
        setup["sides"] = sides.facts
        await _start(sides, arguments)
        speed = _speed(arguments.threads)
        for name in arguments.workloads:
            # A seed for each workload: two of the same kind would begin with the same tokens.
            seed = arguments.seed * len(WORKLOADS) + WORKLOADS.index(name)
            plan = replace(PLANS.get(name, MIXED), seed=seed)
            await _measure(name, plan, sides, arguments.runs, measured)
        if speed is not None:
            speed = speed.at_best(_speed(arguments.threads))
            setup["machine"] = speed._asdict()
            sizes = ModelSizes.of_folder(folder, DTYPE)
            for name in PLANS.keys() & arguments.workloads:
                for case in PLANS[name].cases:
                    measured.floors[name, case] = sizes.workload_floor_s(PLANS[name], case, speed)
    setup["load_1min_after"] = facts()["load_1min"]


def _speed(threads: int) -> MachineSpeed | None:
    """None, with a line of progress: it cannot be measured here."""
    try:
        speed = measure_speed(DTYPE, threads)
    except CannotMeasure as error:
        progress(f"no floors: {error}")
        return None
    progress(f"with {threads} threads this machine {speed}")
    return speed


async def _start(sides: Sides, arguments: argparse.Namespace) -> None:
    worker_arguments = tuple(arguments.worker_argument)
    for peer in arguments.peers:
        progress(f"starting {peer}")
        await sides.start_peer(peer)
    if "engine" in arguments.ours:
        progress("starting our engine without gRPC")
        await sides.start_engine(worker_arguments)
    if "grpc" in arguments.ours:
        progress("starting manager and worker")
        await sides.start_cluster(worker_arguments)


async def _measure(name: str, plan: LoadPlan, sides: Sides, num_runs: int, measured: Measurements) -> None:
    """One workload: the sides in turn within each repetition. Repetition 0 is the warm-up. Only whole repetitions count.

    `mixed` is for KV waste: kvpool's cluster alone, its blocks sampled four times a second.
    """
    engines = sides.measured(name)
    for repetition in range(num_runs + 1):
        conversations = plan.conversations(SERVED, repetition)
        found: list[tuple[CacheCase, str, Measured]] = []
        for side, engine in engines.items():
            watch = LoadObserver(stall_seconds=STALL_SECONDS)
            if name == "mixed" and isinstance(engine, KvpoolEngine):
                engine.forget()
                watch = replace(watch, look_at_blocks=engine.waste)
            for case in plan.cases:
                before = await sides.counts(side)
                listener = Listener(engine)
                with _awake(engine):
                    run = await run_load(listener, conversations, plan.arrivals, watch)
                if run.error is not None:
                    raise run.error
                after = await sides.counts(side)
                counts = None if after is None or before is None else after.since(before)
                what = f"run {repetition}" if repetition else "warm-up"
                progress(f"{name}, {what}: {side} {case} {run.seconds:.2f} s")
                found.append((case, side, Measured(run, counts, listener.answers)))
        for case, side, one in found if repetition else ():
            measured.add(name, case, side, one)


@contextlib.contextmanager
def _awake(engine: EngineUnderLoad) -> Iterator[None]:
    """Resume an engine behind a pipe within the context. kvpool's cluster is never suspended: its leases would end, and it does not
    spin."""
    if not isinstance(engine, PipedEngine):
        yield
        return
    engine.resume()
    try:
        yield
    finally:
        engine.suspend()


def main() -> None:
    parser = command_line(__doc__, runs=5, json_file=True)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: all")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=list(PEERS),
        default=list(DEFAULT_PEERS),
        help=f"default: {' '.join(DEFAULT_PEERS)}",
    )
    parser.add_argument(
        "--ours", nargs="+", choices=["engine", "grpc"], default=["engine", "grpc"], help="default: both"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each side (default 2)")
    parser.add_argument(
        "--wait-policy", choices=list(WAIT_POLICIES), default="passive",
        help="how the threads of all sides wait between two products: passive (default), as in a worker; spinning for about 3 ms, "
        "OpenMP's default, which needs an otherwise idle machine; or brief, about a millisecond. The native step has its own waits",
    )  # fmt: skip
    parser.add_argument("--worker-argument", action="append", default=[], help="another argument for kvpool's worker")
    parser.add_argument("--seed", type=int, default=1, help="of all prompts (default 1)")
    arguments = parser.parse_args()
    measured = Measurements()
    setup: dict[str, Any] = {"error": None}
    try:
        asyncio.run(measure(arguments, measured, setup))
    except (KeyboardInterrupt, asyncio.CancelledError):
        setup["error"] = "interrupted"
    except (EngineFailed, KvpoolError) as error:
        setup["error"] = str(error)

    def show_tables() -> None:
        show(measured, OURS)
        print(f"\n{json.dumps(setup)}")

    found = {"measured": measured.as_json(), "ratios": ratios_as_json(measured, OURS), **setup}
    report_as(arguments.json, found, show_tables)
    if setup["error"] is not None:
        sys.exit(f"ended early, the figures are of the complete repetitions: {setup['error']}")


if __name__ == "__main__":
    main()
