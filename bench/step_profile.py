"""Profile of a step: SmolLM2-135M-Instruct in a worker's runner, without engine, manager and wire.

python -m bench.step_profile [--runtime native] [--dtype bfloat16] [--threads N] [--runs N] [--json]

Each case is a step as in the workloads of bench.serve, with generated block tables. First its time, then its shares: with torch
of each kind of module and of attention, measured around each call; natively of each kind of phase, as the calling thread saw it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
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


def _profile(
    loaded: LoadedModel, backend: AttentionBackend | None, runner: ModelRunner, case: Step, runs: int
) -> dict[str, Any]:
    seconds = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        runner.execute(case)
        seconds.append(time.perf_counter() - began)
    spent = (
        _by_phase(runner.forward, runner, case, runs)
        if backend is None
        else _by_module(loaded, backend, runner, case, runs)
    )
    watched = spent.pop("all")
    shares = {kind: part / watched for kind, part in sorted(spent.items(), key=lambda entry: -entry[1])}
    shares["everything else"] = 1.0 - sum(shares.values())
    return {"seconds": statistics.median(seconds[1:]), "least_seconds": min(seconds[1:]), "shares": shares}


def _by_module(
    loaded: LoadedModel, backend: AttentionBackend, runner: ModelRunner, case: Step, runs: int
) -> dict[str, float]:
    """Seconds by kind of module, and of all runs."""
    watch = Stopwatch()
    with _watched(modules_of(loaded.runtime), backend, watch):
        began = time.perf_counter()
        for _ in range(runs):
            runner.execute(case)
        return {**watch.seconds, "all": time.perf_counter() - began}


def _by_phase(forward: Any, runner: ModelRunner, case: Step, runs: int) -> dict[str, float]:
    """Seconds by kind of phase, and of all runs."""
    forward.phase_seconds()  # turns the clock on
    found: dict[str, float] = defaultdict(float)
    for _ in range(runs):
        began = time.perf_counter()
        runner.execute(case)
        found["all"] += time.perf_counter() - began
        for kind, seconds in forward.phase_seconds().items():
            found[kind] += seconds
    return dict(found)


def main() -> None:
    parser = command_line(__doc__, runs=15, of="runs of each step")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="(default 2)")
    parser.add_argument("--runtime", choices=["native", "torch"], default="native")
    arguments = parser.parse_args()
    settings = ModelSettings(
        "smollm2", arguments.dtype, "cpu", num_threads=arguments.threads, runtime=arguments.runtime
    )
    loaded = load_model(settings, progress)
    backend = loaded.attention_backend("auto", BLOCK_SIZE, progress)
    plan = loaded.plan(MemorySettings(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS), backend).kv_cache
    runner = loaded.runner(plan, backend)
    found: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        progress(name)
        found[name] = _profile(loaded, backend, runner, case, arguments.runs)
    if arguments.json:
        print(json.dumps({"cases": found, "facts": facts("torch", "transformers")}))
        return
    kinds = list(dict.fromkeys(kind for figures in found.values() for kind in figures["shares"]))
    table = Table("step", "ms", *kinds, box=None)
    for name, figures in found.items():
        shares = (f"{figures['shares'].get(kind, 0.0):.0%}" for kind in kinds)
        table.add_row(name, f"{figures['seconds'] * 1000:.1f}", *shares)
    print_table(table)


if __name__ == "__main__":
    main()
