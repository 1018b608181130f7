"""A whole cluster on one CPU machine against transformers' continuous batching, with SmolLM2-135M-Instruct in bfloat16.

python -m bench.cluster [--runs N] [--without-peer] [--json]

16 requests of 512 shared + 32 own + 32 generated tokens, sent at once. Ours goes the whole way: client, gRPC, worker, manager.
Both are warmed by one full-size batch; cold means fresh prefixes in the warmed process, warm the same prompts once more.
Repetitions in turn, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any, Final

from bench.our_cluster import BatchResult, OurCluster
from bench.report import Ratio, Series, facts, progress
from worker_service.model.cache_dir import default_cache_dir
from worker_service.model.resolve import resolve_model

NUM_REQUESTS: Final = 16
NUM_SHARED: Final = 512
NUM_OWN: Final = 32
NUM_GENERATED: Final = 32
FIRST_TOKEN: Final = 1_000
"""Prompts are random ordinary tokens, no special ones."""
LAST_TOKEN: Final = 40_000
NUM_CACHE_TOKENS: Final = 32_768
"""KV that either side may keep."""

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


class TransformersPeer:
    """The peer's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, folder: str, arguments: argparse.Namespace) -> TransformersPeer:
        """Start it and wait until its model is loaded."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.transformers_peer", folder),
            *("--page-size", str(arguments.peer_page_size), "--num-tokens", str(NUM_CACHE_TOKENS)),
            *("--max-batch-tokens", str(arguments.peer_max_batch_tokens), "--threads", str(arguments.threads)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(arguments.threads)},
        )
        peer = cls(process)
        await peer._read()
        return peer

    async def generate(self, batch: Sequence[Sequence[int]]) -> float:
        """Run a batch; returns its seconds, as measured in the peer's own process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": batch, "max_new_tokens": NUM_GENERATED}).encode() + b"\n")
        answer = await self._read()
        if answer["num_tokens"] != [NUM_GENERATED] * len(batch):
            raise RuntimeError(f"the peer generated {answer['num_tokens']} tokens")
        seconds: float = answer["seconds"]
        return seconds

    async def _read(self) -> Any:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the peer ended; run `python -m bench.transformers_peer` by hand to see why")
        return json.loads(line)

    async def stop(self) -> None:
        """End its process."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All repetitions of both sides, in turn."""
    names = ("cold", "warm")
    ours = {name: Series(f"kvpool, {name}") for name in names}
    theirs = {name: Series(f"transformers, {name}") for name in names}
    results: list[tuple[str, BatchResult]] = []
    cluster = OurCluster([*WORKER_ARGUMENTS, *arguments.worker_argument], arguments.threads)
    async with AsyncExitStack() as stack:
        folder = resolve_model("smollm2", default_cache_dir(), progress).path
        progress("starting manager and worker")
        await stack.enter_async_context(cluster)
        peer = None
        if not arguments.without_peer:
            progress("starting transformers")
            peer = await TransformersPeer.start(str(folder), arguments)
            stack.push_async_callback(peer.stop)
        for run in range(arguments.runs + 1):
            what = f"run {run} of {arguments.runs}" if run else "warm-up"
            batch = prompts(run)
            for name in names:
                result = await cluster.generate(batch, NUM_GENERATED)
                results.append((name if run else "warm-up", result))
                progress(
                    f"{what}: kvpool {name} {result.seconds:.2f} s, a decode step {result.step_seconds * 1000:.0f} ms"
                )
                if run:
                    ours[name].seconds.append(result.seconds)
            for name in names if peer is not None else ():
                assert peer is not None
                seconds = await peer.generate(batch)
                progress(f"{what}: transformers {name} {seconds:.2f} s")
                if run:
                    theirs[name].seconds.append(seconds)
    return {
        "ours": ours,
        "peer": theirs if peer is not None else None,
        "ratio": {name: Ratio(ours[name], theirs[name]) for name in names} if peer is not None else None,
        "last": {name: result for name, result in results if name != "warm-up"},
        "forwarded_tokens_expected": sum(result.num_forwarded_tokens for _, result in results),
        "worker": cluster.worker_totals,
        "settings": {
            "worker": [*WORKER_ARGUMENTS, *arguments.worker_argument],
            "threads": arguments.threads,
            "peer_page_size": arguments.peer_page_size,
            "peer_max_batch_tokens": arguments.peer_max_batch_tokens,
        },
        "facts": facts("kvpool", "torch", "transformers", "grpcio"),
    }


def show(measured: dict[str, Any]) -> None:
    """For people."""
    print(
        f"\n{NUM_REQUESTS} requests of {NUM_SHARED} shared + {NUM_OWN} own + {NUM_GENERATED} generated tokens, bfloat16"
    )
    for name, series in measured["ours"].items():
        print(f"  kvpool {name:<14}    {series}")
        if measured["peer"]:
            print(f"  transformers {name:<8}    {measured['peer'][name]}")
            print(f"  ratio {name:<15}    {measured['ratio'][name]}")
    for name, result in measured["last"].items():
        rpcs = ", ".join(f"{count} {kind}" for kind, count in result.rpcs.items())
        print(
            f"  last {name} batch: {result.num_cached_tokens:,} of {result.num_prompt_tokens:,} prompt tokens cached, "
            f"{result.num_forwarded_tokens:,} tokens to forward;\n"
            f"    first token after {result.first_token_seconds * 1000:.0f} ms, then {result.step_seconds * 1000:.0f} ms a token; "
            f"RPCs to the manager: {rpcs}"
        )
    worker = measured["worker"]
    print(f"  tokens forwarded, all batches: {worker.get('forwarded_tokens'):,}")
    print(f"    by Σ(prompt − cached + generated − 1): {measured['forwarded_tokens_expected']:,}")
    print(f"  RPCs awaited inside decode steps: {worker.get('decodes_that_waited_for_a_call')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="interleaved repetitions (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of either side (default 2)")
    parser.add_argument("--without-peer", action="store_true", help="measure only our side; seconds, not minutes")
    parser.add_argument("--peer-page-size", type=int, default=32)
    parser.add_argument("--peer-max-batch-tokens", type=int, default=2048)
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
