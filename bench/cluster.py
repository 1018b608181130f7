"""A whole cluster on one CPU machine against transformers' continuous batching, with SmolLM2-135M-Instruct in bfloat16.

python -m bench.cluster [--runs N] [--peers [defaults] [tuned]] [--json]

16 requests of 512 shared + 32 own + 32 generated tokens, sent at once. Ours goes the whole way: client, gRPC, worker, manager.
Both are warmed by one full-size batch; cold means fresh prefixes in the warmed process, warm the same prompts once more.
Repetitions in turn, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any, Final

from bench.our_cluster import BatchResult, OurCluster
from bench.peer_process import PEERS, PeerBatch, TransformersPeer
from bench.report import Ratio, Series, facts, progress
from kvpool.worker_service.cpu_share import SPIN_COUNT
from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from kvpool.worker_service.model.source.resolve import resolve_model

CASES: Final = ("cold", "warm")
NUM_REQUESTS: Final = 16
NUM_SHARED: Final = 512
NUM_OWN: Final = 32
NUM_GENERATED: Final = 32
FIRST_TOKEN: Final = 1_000
"""Prompts are random ordinary tokens, no special ones."""
LAST_TOKEN: Final = 40_000
NUM_CACHE_TOKENS: Final = 32_768
"""KV that either side may keep."""

WAIT_POLICIES: Final = {
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    # Not ACTIVE: that lets idle processes spin for minutes, on the cores that the other side is being measured on.
    "spinning": {"GOMP_SPINCOUNT": "300000"},
    # As --model-spin of a worker; here for both sides.
    "brief": {"GOMP_SPINCOUNT": SPIN_COUNT},
}

WORKER_ARGUMENTS: Final = (
    *("--model", "smollm2", "--dtype", "bfloat16", "--device", "cpu"),
    *("--block-size", "16", "--num-blocks", str(NUM_CACHE_TOKENS // 16)),
)


def prompts(run: int) -> list[list[int]]:
    """The batch of one run: its prefix is shared by no other run."""
    draw = random.Random(run)
    tokens = range(FIRST_TOKEN, LAST_TOKEN)
    shared = draw.choices(tokens, k=NUM_SHARED)
    return [shared + draw.choices(tokens, k=NUM_OWN) for _ in range(NUM_REQUESTS)]


class Contestant:
    """One side's repetitions, cold and warm."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wall = {case: Series(f"{name}, {case}") for case in CASES}
        self.cpu = {case: Series(f"{name}, {case}, CPU time") for case in CASES}

    def add(self, run: int, case: str, batch: BatchResult | PeerBatch) -> None:
        """Take in a batch; run 0 is the warm-up."""
        progress(f"{f'run {run}' if run else 'warm-up'}: {self.name} {case} {batch.seconds:.2f} s")
        if run:
            self.wall[case].seconds.append(batch.seconds)
            self.cpu[case].seconds.append(batch.cpu_seconds)

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {"name": self.name, "wall": self.wall, "cpu": self.cpu}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All repetitions of all sides, in turn."""
    ours = Contestant("kvpool")
    theirs = {name: Contestant(f"transformers ({name})") for name in arguments.peers}
    results: list[tuple[str, BatchResult]] = []
    worker_arguments = [*WORKER_ARGUMENTS, *arguments.worker_argument]
    environment = {"OMP_NUM_THREADS": str(arguments.threads), **WAIT_POLICIES[arguments.wait_policy]}
    cluster = OurCluster(worker_arguments, environment)
    async with AsyncExitStack() as stack:
        folder = str(resolve_model("smollm2", default_cache_dir(), progress).path)
        progress("starting manager and worker")
        await stack.enter_async_context(cluster)
        peers: dict[str, TransformersPeer] = {}
        for name in theirs:
            progress(f"starting transformers ({name})")
            peers[name] = await TransformersPeer.start(folder, PEERS[name], NUM_CACHE_TOKENS, environment)
            stack.push_async_callback(peers[name].stop)
        for run in range(arguments.runs + 1):
            batch = prompts(run)
            for case in CASES:
                result = await cluster.generate(batch, NUM_GENERATED)
                results.append((case, result))
                ours.add(run, case, result)
            for name, peer in peers.items():
                for case in CASES:
                    theirs[name].add(run, case, await peer.generate(batch, NUM_GENERATED))
    return {
        "ours": ours,
        "peers": theirs,
        "ratios": {
            name: {
                case: {"wall": Ratio(ours.wall[case], peer.wall[case]), "cpu": Ratio(ours.cpu[case], peer.cpu[case])}
                for case in CASES
            }
            for name, peer in theirs.items()
        },
        "last": dict(results),
        "forwarded_tokens_expected": sum(result.num_forwarded_tokens for _, result in results),
        "worker": cluster.worker_totals,
        "settings": {
            "worker": worker_arguments,
            "environment": environment,
            "peers": {name: asdict(PEERS[name]) for name in theirs},
        },
        "facts": facts("kvpool", "torch", "transformers", "grpcio"),
    }


def show(measured: dict[str, Any]) -> None:
    """For people."""
    print(
        f"\n{NUM_REQUESTS} requests of {NUM_SHARED} shared + {NUM_OWN} own + {NUM_GENERATED} generated tokens, bfloat16"
    )
    for case in CASES:
        ours: Contestant = measured["ours"]
        print(f"  {case:<5} {ours.name:<24} {ours.wall[case]}; CPU time {ours.cpu[case]}")
        for name, peer in measured["peers"].items():
            ratio = measured["ratios"][name][case]
            print(f"  {case:<5} {peer.name:<24} {peer.wall[case]}; CPU time {peer.cpu[case]}")
            print(f"  {case:<5}   against {name:<14} {ratio['wall']}; in CPU time {ratio['cpu']}")
    for case, result in measured["last"].items():
        rpcs = ", ".join(f"{count} {kind}" for kind, count in result.rpcs.items())
        print(
            f"  last {case} batch: {result.num_cached_tokens:,} of {result.num_prompt_tokens:,} prompt tokens cached, "
            f"{result.num_forwarded_tokens:,} tokens to forward;\n"
            f"    first token after {result.first_token_seconds * 1000:.0f} ms, then {result.step_seconds * 1000:.0f} ms a token; "
            f"RPCs to the manager: {rpcs}"
        )
    worker = measured["worker"]
    print(
        f"  tokens forwarded over all batches: {worker.get('forwarded_tokens'):,} by the worker's count, "
        f"{measured['forwarded_tokens_expected']:,} by Σ(prompt − cached + generated − 1)"
    )
    print(f"  RPCs awaited inside decode steps: {worker.get('decodes_that_waited_for_a_call')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="interleaved repetitions (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of either side (default 2)")
    parser.add_argument(
        "--wait-policy",
        choices=list(WAIT_POLICIES),
        default="passive",
        help="how the threads of either side wait between two products: passive, as workers do by themselves (default), or "
        "spinning for some 3 ms, as OpenMP does by itself, which needs a machine that does nothing else",
    )
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="none: our side alone")
    parser.add_argument("--worker-argument", action="append", default=[], help="a further argument for the worker")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("--runs must be at least 1")
    measured = asyncio.run(measure(arguments))
    if arguments.json:
        print(
            json.dumps(measured, default=lambda value: value.as_json() if hasattr(value, "as_json") else asdict(value))
        )
    else:
        show(measured)


if __name__ == "__main__":
    main()
