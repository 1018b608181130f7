"""Where the time of a step goes: SmolLM2-135M-Instruct in a worker's own runner, without engine, manager and wire.

python -m bench.step_profile [--dtype bfloat16] [--threads N] [--runs N] [--json]

Each case is a step of the kind that the workloads of bench.serve are made of, over block tables made by hand. First its time as it
is, then how much of it each kind of module takes, attention included: measured around each call, in the same step again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from bench.report import facts, progress
from bench.stopwatch import Stopwatch, timed_calls
from kvpool.worker_service.attention.backend import AttentionBackend
from kvpool.worker_service.engine.sampling_params import SamplingParams
from kvpool.worker_service.engine.step import SequencePart, Step
from kvpool.worker_service.model.forward.runner import ModelRunner
from kvpool.worker_service.model.load import LoadedModel, load_model
from kvpool.worker_service.model.memory.plan import MemorySettings
from kvpool.worker_service.model.settings import ModelSettings

BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 2048
GREEDY: Final = SamplingParams()


class _Tables:
    """Block tables for the sequences of one case; the first blocks may be the same in all."""

    def __init__(self, num_shared_tokens: int = 0) -> None:
        self._shared = list(range(1, 1 + num_shared_tokens // BLOCK_SIZE))
        self._next = 1 + len(self._shared)

    def table(self, num_tokens: int) -> list[int]:
        """For a sequence of so many tokens."""
        own = -(-num_tokens // BLOCK_SIZE) - len(self._shared)
        self._next += own
        return [*self._shared, *range(self._next - own, self._next)]


def _step(num_sequences: int, num_new: int, num_before: int, num_shared: int = 0) -> Step:
    """Sequences that compute `num_new` tokens behind `num_before`, of which the first `num_shared` are common."""
    tables = _Tables(num_shared)
    return Step(
        [
            SequencePart(
                token_ids=[1_000 + (7 * number + index) % 30_000 for index in range(num_new)],
                start=num_before,
                block_table=tables.table(num_before + num_new),
                sampling=GREEDY,
            )
            for number in range(num_sequences)
        ]
    )


CASES: Final = {
    "decode, 1 sequence of 128": _step(1, 1, 128),
    "decode, 16 sequences of 560, of which 512 shared": _step(16, 1, 560, 512),
    "decode, 16 sequences of 560 of their own": _step(16, 1, 560),
    "decode, 8 sequences of 4,144, of which 4,096 shared": _step(8, 1, 4_144, 4_096),
    "prefill, 512 tokens": _step(1, 512, 0),
    "prefill, 16 sequences of 32 behind 512 shared": _step(16, 32, 512, 512),
}


@contextmanager
def _watched(model: torch.nn.Module, backend: AttentionBackend, watch: Stopwatch) -> Iterator[None]:
    """Every leaf module and the attention are timed meanwhile."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    with ExitStack() as stack:
        for module in model.modules():
            if next(module.children(), None) is None:
                kind = "output head" if module is head else type(module).__name__
                before = module.register_forward_pre_hook(lambda *_: watch.begin())
                after = module.register_forward_hook(lambda *_, kind=kind: watch.end(kind))
                stack.callback(before.remove)
                stack.callback(after.remove)
        stack.enter_context(timed_calls(watch, (backend, "begin", "attention"), (backend, "attend", "attention")))
        yield


def _profile(loaded: LoadedModel, backend: AttentionBackend, runner: ModelRunner, step: Step, runs: int) -> Any:
    seconds = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        runner.execute(step)
        seconds.append(time.perf_counter() - began)
    watch = Stopwatch()
    with _watched(loaded.model, backend, watch):
        began = time.perf_counter()
        for _ in range(runs):
            runner.execute(step)
        watched = time.perf_counter() - began
    shares = {kind: spent / watched for kind, spent in sorted(watch.seconds.items(), key=lambda entry: -entry[1])}
    shares["everything else"] = 1.0 - sum(shares.values())
    return {"seconds": statistics.median(seconds[1:]), "shares": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="(default 2)")
    parser.add_argument("--runs", type=int, default=15, help="of each step (default 15)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    arguments = parser.parse_args()
    settings = ModelSettings(model="smollm2", dtype=arguments.dtype, device="cpu", num_threads=arguments.threads)
    loaded = load_model(settings, progress)
    backend = loaded.attention_backend("auto", BLOCK_SIZE, progress)
    plan = loaded.plan(MemorySettings(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS), backend).kv_cache
    runner = loaded.runner(plan, backend)
    found = {}
    for name, step in CASES.items():
        progress(name)
        found[name] = _profile(loaded, backend, runner, step, arguments.runs)
    if arguments.json:
        print(json.dumps({"cases": found, "facts": facts("torch", "transformers")}))
        return
    kinds = list(dict.fromkeys(kind for case in found.values() for kind in case["shares"]))
    table = Table("step", "ms", *kinds, box=None)
    for name, case in found.items():
        table.add_row(
            name, f"{case['seconds'] * 1000:.1f}", *(f"{case['shares'].get(kind, 0.0):.0%}" for kind in kinds)
        )
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
