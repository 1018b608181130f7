"""What batch invariance costs: SmolLM2-135M-Instruct in float32 with each partition of attention's keys, in a worker's own runner.

python -m bench.partitions [CASE …] [--partitions none,192,…] [--threads N] [--runs N] [--json]

The partitions take turns, run after run, in one process, so that whatever else the machine does meets all of them. "none" calls the
kernels as they are fastest, which is not batch-invariant. Times are CPU seconds of the process: with one thread these do not
count what other programs took of the core. The table has the median and, as a ratio, each run's time over that of "none" in
the same round, of which again the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.report import facts, progress
from kvpool.worker_service.attention.invariance import FIXED_SHAPES, OWN_SUMS
from kvpool.worker_service.attention.selection import make_torch
from kvpool.worker_service.attention.torch_backend import FREE_SHAPES, TorchAttention
from kvpool.worker_service.engine.sampling_params import SamplingParams
from kvpool.worker_service.engine.step import SequencePart, Step
from kvpool.worker_service.model.forward.runner import ModelRunner
from kvpool.worker_service.model.load import load_model
from kvpool.worker_service.model.memory.plan import MemorySettings
from kvpool.worker_service.model.settings import ModelSettings

BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 1024
VARIANTS: Final = {
    "none": FREE_SHAPES,
    **{str(shapes.partition): shapes for shapes in FIXED_SHAPES},
    "own sums": OWN_SUMS,
}


def _step(num_sequences: int, num_new: int, num_before: int) -> Step:
    """Sequences of their own that compute `num_new` tokens after `num_before`, and sample one."""
    parts = []
    for number in range(num_sequences):
        num_blocks = -(-(num_before + num_new) // BLOCK_SIZE)
        table = list(range(1 + number * num_blocks, 1 + (number + 1) * num_blocks))
        tokens = [1_000 + (7 * number + index) % 30_000 for index in range(num_new)]
        parts.append(SequencePart(tokens, num_before, table, SamplingParams()))
    return Step(parts)


CASES: Final = {
    "prefill-512": _step(1, 512, 0),
    "prefill-2048": _step(1, 2048, 0),
    "decode-16x560": _step(16, 1, 560),
}


def _measure(
    runner: ModelRunner, backend: TorchAttention, step: Step, names: Sequence[str], runs: int
) -> dict[str, list[float]]:
    """CPU seconds of each run, by variant; one round more, to warm up, is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(runs + 1):
        for name in names:
            backend.shapes = VARIANTS[name]
            began = time.process_time()
            runner.execute(step)
            seconds[name].append(time.process_time() - began)
    return {name: spent[1:] for name, spent in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--partitions", default=",".join(VARIANTS), help="(default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(default 1)")
    parser.add_argument("--runs", type=int, default=7, help="of each partition (default 7)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.cases) - set(CASES)):
        parser.error(f"no such case: {', '.join(unknown)}")
    names = arguments.partitions.split(",")
    if names[0] != "none" or (unknown := sorted(set(names) - set(VARIANTS))):
        parser.error(f"--partitions begins with none, of which the others are ratios; there are {', '.join(VARIANTS)}")
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
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
