"""Builds of the native step against each other: SmolLM2-135M-Instruct on one thread, CPU time.

python -m bench.step_builds [--dtype bfloat16] [--quantize int8] [--runs N] [--json] FILE FILE …

A file is one of worker_service/native/cpu/builds, or a copy of one that another compiler or source has made. All have the number
type --dtype and vectors of one width, so that one copy of the weights and of the KV serves them. They run in turn.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from bench.report import command_line, facts, print_table, progress
from bench.steps import CASES, MEMORY, step
from kvpool.worker_service.engine.step import Step
from kvpool.worker_service.model.forward.native import NativeRuntime
from kvpool.worker_service.model.forward.runner import ModelRunner
from kvpool.worker_service.model.load import LoadedModel, load_model
from kvpool.worker_service.model.settings import ModelSettings
from kvpool.worker_service.native.cpu.library import Library, open_library


def _runner(loaded: LoadedModel, library: Library) -> ModelRunner:
    """Runs the model that is loaded with another library."""
    runtime = loaded.runtime
    assert isinstance(runtime, NativeRuntime)
    own = runtime.packed.library
    layout = (library.numbers_per_word, library.words_per_vector)
    if layout != (own.numbers_per_word, own.words_per_vector):
        raise SystemExit(f"{library.path} is {library.describe()}; this CPU's own is {own.describe()}")
    packed = copy.copy(runtime.packed)
    packed.library = library
    plan = loaded.plan(MEMORY).kv_cache
    return replace(loaded, runtime=replace(runtime, packed=packed)).runner(plan, None)


def _cpu_seconds(runner: ModelRunner, case: Step) -> float:
    began = time.thread_time()
    runner.execute(case)
    return time.thread_time() - began


def main() -> None:
    parser = command_line(__doc__, runs=25, of="runs of each step with each file")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--quantize", choices=["none", "int8"], default="none", help="(default none)")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    settings = ModelSettings(
        "smollm2", arguments.dtype, "cpu", num_threads=1, runtime="native", quantize=arguments.quantize
    )
    loaded = load_model(settings, progress)
    runners = [_runner(loaded, open_library(file.absolute())) for file in arguments.files]
    found: dict[str, list[float]] = {}
    for name, shape in CASES.items():
        progress(name)
        case = step(*shape)
        rounds = [[_cpu_seconds(runner, case) for runner in runners] for _ in range(arguments.runs + 1)]
        found[name] = [statistics.median(seconds) for seconds in zip(*rounds[1:], strict=True)]
    if arguments.json:
        files = [str(file) for file in arguments.files]
        print(json.dumps({"files": files, "cpu_seconds": found, "facts": facts("torch", "transformers")}))
        return
    table = Table("step, CPU ms", *(file.name for file in arguments.files), box=None)
    for name, medians in found.items():
        table.add_row(name, *(f"{1000 * seconds:.1f}" for seconds in medians))
    print_table(table)


if __name__ == "__main__":
    main()
