"""Profile of a step: SmolLM2-135M-Instruct in a worker's runner, without engine, manager and wire.

python -m bench.step_profile [--dtype bfloat16] [--threads N] [--runs N] [--json]

Each case is a step as in the workloads of bench.serve, with generated block tables. First its time, then the share of each kind of
module and of attention: measured around each call, in the same step.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from rich.table import Table

from bench.report import command_line, facts, print_table, progress
from bench.steps import BLOCK_SIZE, step
from bench.stopwatch import Stopwatch, timed_calls
from kvpool.worker_service.attention.backend import AttentionBackend
from kvpool.worker_service.engine.step import Step
from kvpool.worker_service.model.forward.modules import modules_of
from kvpool.worker_service.model.forward.runner import ModelRunner
from kvpool.worker_service.model.load import LoadedModel, load_model
from kvpool.worker_service.model.memory.plan import MemorySettings
from kvpool.worker_service.model.settings import ModelSettings

NUM_BLOCKS: Final = 2048


CASES: Final = {
    "decode, 1 sequence of 128": step(1, 1, 128),
    "decode, 16 sequences of 560, of which 512 shared": step(16, 1, 560, 512),
    "decode, 16 sequences of 560 of their own": step(16, 1, 560),
    "decode, 8 sequences of 4,144, of which 4,096 shared": step(8, 1, 4_144, 4_096),
    "prefill, 512 tokens": step(1, 512, 0),
    "prefill, 16 sequences of 32 after 512 shared": step(16, 32, 512, 512),
}


@contextmanager
def _watched(model: torch.nn.Module, backend: AttentionBackend, watch: Stopwatch) -> Iterator[None]:
    """Time every leaf module and the attention within the context."""
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


def _profile(loaded: LoadedModel, backend: AttentionBackend, runner: ModelRunner, case: Step, runs: int) -> Any:
    seconds = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        runner.execute(case)
        seconds.append(time.perf_counter() - began)
    watch = Stopwatch()
    with _watched(modules_of(loaded.runtime), backend, watch):
        began = time.perf_counter()
        for _ in range(runs):
            runner.execute(case)
        watched = time.perf_counter() - began
    shares = {kind: spent / watched for kind, spent in sorted(watch.seconds.items(), key=lambda entry: -entry[1])}
    shares["everything else"] = 1.0 - sum(shares.values())
    return {"seconds": statistics.median(seconds[1:]), "shares": shares}


def main() -> None:
    parser = command_line(__doc__, runs=15, of="runs of each step")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="(default 2)")
    arguments = parser.parse_args()
    settings = ModelSettings(
        model="smollm2", dtype=arguments.dtype, device="cpu", num_threads=arguments.threads, runtime="torch"
    )
    loaded = load_model(settings, progress)
    backend = loaded.attention_backend("auto", BLOCK_SIZE, progress)
    assert backend is not None
    plan = loaded.plan(MemorySettings(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS), backend).kv_cache
    runner = loaded.runner(plan, backend)
    found = {}
    for name, case in CASES.items():
        progress(name)
        found[name] = _profile(loaded, backend, runner, case, arguments.runs)
    if arguments.json:
        print(json.dumps({"cases": found, "facts": facts("torch", "transformers")}))
        return
    kinds = list(dict.fromkeys(kind for case in found.values() for kind in case["shares"]))
    table = Table("step", "ms", *kinds, box=None)
    for name, case in found.items():
        table.add_row(
            name, f"{case['seconds'] * 1000:.1f}", *(f"{case['shares'].get(kind, 0.0):.0%}" for kind in kinds)
        )
    print_table(table)


if __name__ == "__main__":
    main()
