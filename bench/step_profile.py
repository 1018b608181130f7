"""Profile of a step: SmolLM2-135M-Instruct in a worker's runner, without engine, manager and wire.

python -m bench.step_profile [--runtime native] [--dtype bfloat16] [--quantize int8] [--threads N] [--runs N]
    [--neighbours 0,1,2] [--json [FILE]]

Each case is a step as in the workloads of bench.serve, with generated block tables. First its time and its floor, the least time by
this machine's measured speed (bench.floors), then its shares: with torch of each kind of module and of attention, measured around
each call; natively of each kind of phase, as the calling thread saw it.

With --neighbours the native steps run next to programs that never rest, with one thread and with all in turn, at a worker's nice
value. A step with all threads should take at most 1.2 times as long as with one.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final, cast

import torch
from rich.table import Table

from bench.floors import ModelSizes
from bench.machine_speed import CannotMeasure, measure_speed
from bench.neighbours import next_to_programs, show_next_to
from bench.report import command_line, facts, print_table, progress, report_as
from bench.steps import BLOCK_SIZE, CASES, MEMORY, step
from bench.stopwatch import Stopwatch, timed_calls
from kvpool.worker_service.attention.layer import AttentionBackend
from kvpool.worker_service.model.forward.modules import modules_of
from kvpool.worker_service.model.forward.runner import ModelRunner
from kvpool.worker_service.model.load import LoadedModel, load_model
from kvpool.worker_service.model.placement import dtype_name
from kvpool.worker_service.model.settings import ModelSettings
from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from kvpool.worker_service.model.source.resolve import resolve_model
from kvpool.worker_service.native.cpu.targets import NumberType
from kvpool.worker_service.step import Step

MODEL: Final = "smollm2"


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


def _profiles(loaded: LoadedModel, num_threads: int, runs: int, has_floors: bool) -> dict[str, dict[str, Any]]:
    """Figures of each case, and its floor in seconds; None: it cannot be measured here."""
    backend = loaded.attention_backend("auto", BLOCK_SIZE, progress)
    runner = loaded.runner(loaded.plan(MEMORY, backend).kv_cache, backend)
    found: dict[str, dict[str, Any]] = {}
    for name, shape in CASES.items():
        progress(name)
        found[name] = _profile(loaded, backend, runner, step(*shape), runs)
    runner.close()
    if not has_floors:
        return found
    dtype = cast(NumberType, dtype_name(loaded.runtime.dtype))
    sizes = ModelSizes.of_folder(resolve_model(MODEL, default_cache_dir(), progress).path, dtype)
    try:
        speed = measure_speed(dtype, num_threads)
    except CannotMeasure as error:
        progress(f"no floors: {error}")
        return found
    progress(f"with {num_threads} threads this machine {speed}")
    for name, shape in CASES.items():
        found[name]["floor_seconds"] = speed.floor_s(*sizes.cost(*shape))
    return found


def _show_profiles(found: Mapping[str, Mapping[str, Any]]) -> None:
    kinds = list(dict.fromkeys(kind for figures in found.values() for kind in figures["shares"]))
    table = Table("step", "ms", "floor", *kinds, box=None)
    for name, figures in found.items():
        shares = (f"{figures['shares'].get(kind, 0.0):.0%}" for kind in kinds)
        floor = figures.get("floor_seconds")
        table.add_row(
            name, f"{figures['seconds'] * 1000:.1f}", "-" if floor is None else f"{floor * 1000:.1f}", *shares
        )
    print_table(table)


def _numbers(text: str) -> list[int]:
    """Of programs: `0,1,2`."""
    numbers = [int(number) for number in text.split(",")]
    if min(numbers) < 0:
        raise ValueError(text)
    return numbers


def main() -> None:
    parser = command_line(__doc__, runs=15, of="runs of each step", json_file=True)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="(default 2)")
    parser.add_argument("--runtime", choices=["native", "torch"], default="native")
    parser.add_argument("--quantize", choices=["none", "int8"], default="none", help="(default none)")
    parser.add_argument(
        "--neighbours", type=_numbers, metavar="N,N,…", help="only the times next to these numbers of busy programs"
    )
    arguments = parser.parse_args()
    if arguments.neighbours is not None and arguments.runtime != "native":
        parser.error("--neighbours is for --runtime native: torch's threads sleep while they wait")
    torch.set_num_threads(arguments.threads)
    settings = ModelSettings(
        MODEL,
        arguments.dtype,
        "cpu",
        runtime=arguments.runtime,
        quantize=arguments.quantize,
    )
    the_facts = facts("torch", "transformers")
    if arguments.neighbours is None:
        has_floors = arguments.quantize == "none"  # the speed of integers is not measured
        profiles = _profiles(load_model(settings, progress), arguments.threads, arguments.runs, has_floors)
        report_as(arguments.json, {"cases": profiles, "facts": the_facts}, lambda: _show_profiles(profiles))
        return
    found = next_to_programs(settings, arguments.neighbours, arguments.runs)
    as_json = {name: [row.as_json() for row in rows] for name, rows in found.items()}
    report_as(arguments.json, {"cases": as_json, "facts": the_facts}, lambda: show_next_to(found, arguments.threads))


if __name__ == "__main__":
    main()
