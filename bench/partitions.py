"""The cost of batch invariance: SmolLM2-135M-Instruct in float32 with each partition of attention's keys, in a worker's runner.

python -m bench.partitions [CASE …] [--partitions none,192,…] [--threads N] [--runs N] [--json]

The partitions run in turn in one process, so that other load on the machine affects all equally. "none" has the fastest shapes,
which are not batch-invariant. Times are CPU seconds of the process: with one thread these exclude other programs. The table has
medians of the times, and of the ratios to "none" in the same round.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import Final

from rich.table import Table

from bench.report import command_line, facts, print_table, progress
from bench.steps import BLOCK_SIZE, step
from kvpool.worker_service.attention.invariance import FIXED_SHAPES, OWN_SUMS
from kvpool.worker_service.attention.selection import make_torch
from kvpool.worker_service.attention.torch_backend import FREE_SHAPES, TorchAttention
from kvpool.worker_service.engine.step import Step
from kvpool.worker_service.model.forward.runner import ModelRunner
from kvpool.worker_service.model.load import load_model
from kvpool.worker_service.model.memory.plan import MemorySettings
from kvpool.worker_service.model.settings import ModelSettings

NUM_BLOCKS: Final = 1024
VARIANTS: Final = {
    "none": FREE_SHAPES,
    **{str(shapes.partition): shapes for shapes in FIXED_SHAPES},
    "own sums": OWN_SUMS,
}


CASES: Final = {
    "prefill-512": step(1, 512, 0),
    "prefill-2048": step(1, 2048, 0),
    "decode-16x560": step(16, 1, 560),
}


def _measure(
    runner: ModelRunner, backend: TorchAttention, case: Step, names: Sequence[str], runs: int
) -> dict[str, list[float]]:
    """CPU seconds of each run, by variant, without the warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(runs + 1):
        for name in names:
            backend.shapes = VARIANTS[name]
            began = time.process_time()
            runner.execute(case)
            seconds[name].append(time.process_time() - began)
    return {name: spent[1:] for name, spent in seconds.items()}


def main() -> None:
    parser = command_line(__doc__, runs=7, of="runs of each partition")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--partitions", default=",".join(VARIANTS), help="(default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(default 1)")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.cases) - set(CASES)):
        parser.error(f"no such case: {', '.join(unknown)}")
    names = arguments.partitions.split(",")
    if names[0] != "none" or (unknown := sorted(set(names) - set(VARIANTS))):
        parser.error(f"--partitions must begin with none, the reference of the ratios; there are {', '.join(VARIANTS)}")
    settings = ModelSettings(model="smollm2", dtype="float32", device="cpu", num_threads=arguments.threads)
    loaded = load_model(settings, progress)
    backend = make_torch(loaded.dtype, loaded.device, loaded.attention_needs)
    chosen = next(name for name, shapes in VARIANTS.items() if shapes.partition == backend.shapes.partition)
    progress(f"a worker would choose {chosen} here")
    runner = loaded.runner(loaded.plan(MemorySettings(BLOCK_SIZE, NUM_BLOCKS), backend).kv_cache, backend)
    found = {}
    for name in arguments.cases or CASES:
        progress(name)
        found[name] = _measure(runner, backend, CASES[name], names, arguments.runs)
    if arguments.json:
        print(json.dumps({"seconds": found, "chosen": chosen, "facts": facts("torch", "transformers")}))
        return
    table = Table("step", *names, box=None)
    for name, seconds in found.items():
        table.add_row(f"{name}, ms", *(f"{statistics.median(spent) * 1000:.0f}" for spent in seconds.values()))
        ratios = (
            statistics.median(ours / free for ours, free in zip(spent, seconds["none"], strict=True))
            for spent in seconds.values()
        )
        table.add_row("ratio", *(f"{ratio:.2f}" for ratio in ratios))
    print_table(table)


if __name__ == "__main__":
    main()
