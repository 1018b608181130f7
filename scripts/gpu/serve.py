"""The part serve: random weights in files, a manager and a worker as processes, and `kvpool bench serve` against them over gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from bench.floors import ModelSizes
from tests.cluster.cluster import Cluster, free_port
from tests.cluster.process import Process
from tests.scrape import scrape

from .cases import AddRow, Case
from .results import Outcome, Row
from .setup import Setup
from .shapes import MAX_MODEL_LEN, Shape, build, shapes
from .speeds import Speeds, measure_speeds

_WORKER: Final = "worker"
_LOG_CHARACTERS: Final = 3000
_BENCH_S: Final = 600.0
"""For one run, longer than any deadline."""
_SPARE: Final = 1.2
"""Free space of a folder needed in addition to the weights."""
_CPU_BLOCKS: Final = 256


@dataclass(frozen=True, slots=True)
class _Load:
    """One run of `kvpool bench serve`."""

    workload: str
    users: int
    requests: int
    prefix_tokens: int
    own_tokens: int
    generated_tokens: int

    def flags(self) -> list[str]:
        given = {
            "--workload": self.workload,
            "--users": self.users,
            "--requests": self.requests,
            "--prefix-tokens": self.prefix_tokens,
            "--own-tokens": self.own_tokens,
            "--generated-tokens": self.generated_tokens,
            "--seed": 1,
        }
        return [text for flag, value in given.items() for text in (flag, str(value))]


_FULL: Final = (
    _Load("unshared", 1, 2, 0, 512, 64),
    _Load("unshared", 16, 32, 0, 512, 64),
    _Load("unshared", 64, 128, 0, 512, 64),
    _Load("shared", 16, 32, 1024, 32, 64),
    _Load("shared", 64, 128, 1024, 32, 64),
)
_TINY: Final = (_Load("shared", 2, 4, 32, 8, 4),)


def cases(setup: Setup) -> Sequence[Case]:
    """One for each shape."""
    return [
        Case(f"serve {shape.name}", _serve, (shape,), needs_fresh_process=not setup.is_tiny)
        for shape in shapes(setup.is_tiny)
    ]


def _serve(setup: Setup, add_row: AddRow, shape: Shape) -> None:
    device = torch.device(setup.device)
    speeds = measure_speeds(device, setup.is_tiny)
    with tempfile.TemporaryDirectory(dir=setup.folder) as folder:
        model = Path(folder, shape.name)
        add_row(_write(shape, device, model))
        asyncio.run(_measure(setup, add_row, shape, speeds, model, Path(folder)))


def _write(shape: Shape, device: torch.device, folder: Path) -> Row:
    """Write random weights as safetensors. Raises RuntimeError if they do not fit."""
    began = time.perf_counter()
    outline = build(shape, torch.bfloat16, torch.device("meta"))
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in outline.parameters())
    free = shutil.disk_usage(folder.parent).free
    if free < _SPARE * num_bytes:
        raise RuntimeError(
            f"the weights need {num_bytes / 1e9:.1f} GB in {folder.parent}, which has {free / 1e9:.1f} GB free: set TMPDIR"
        )
    build(shape, torch.bfloat16, device).save_pretrained(folder)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Row(f"{shape.name} written", figures={"gb": num_bytes / 1e9, "write_s": time.perf_counter() - began})


async def _measure(setup: Setup, add_row: AddRow, shape: Shape, speeds: Speeds, model: Path, folder: Path) -> None:
    metrics_port = free_port()
    settings: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "metrics_port": metrics_port}
    if not setup.is_cuda:
        settings["num_blocks"] = _CPU_BLOCKS
    async with Cluster(folder) as cluster:
        await cluster.start_manager()
        began = time.perf_counter()
        worker = cluster.start_worker(
            _WORKER,
            threads=1 if setup.is_tiny else os.cpu_count() or 1,
            model=model,
            device=setup.device,
            dtype="bfloat16",
            cache_dir=folder / "cache",
            runtime="torch",
            **settings,
        )
        try:
            await cluster.until_registered(_WORKER)
            start_s = time.perf_counter() - began
            add_row(Row(f"{shape.name} started", figures={"start_s": start_s, "log": worker.log.splitlines()}))
            for index, load in enumerate(_TINY if setup.is_tiny else _FULL):
                name = f"{shape.name} {load.workload} {load.users} users"
                before = await _engine_totals(metrics_port)
                status, output = await _bench(cluster, load, folder / f"bench-{index}.log")
                if status != 0:
                    add_row(Row(name, Outcome.FAILED, f"`kvpool bench serve` ended with status {status}:\n{output}"))
                    continue
                figures = _figures(output)
                floor_ms = _decode_floor_ms(shape, load, speeds)
                add_row(
                    Row(
                        name,
                        figures={
                            **figures,
                            "decode_floor_ms": floor_ms,
                            "of_roofline": floor_ms / figures["inter_token_ms"],
                            "engine": _differences(before, await _engine_totals(metrics_port)),
                        },
                    )
                )
        except Exception as error:
            raise RuntimeError(f"{error}\nthe worker's log:\n{worker.log[-_LOG_CHARACTERS:]}") from error


async def _bench(cluster: Cluster, load: _Load, log: Path) -> tuple[int, str]:
    """Exit status and output of one run."""
    command = ["-m", "kvpool.cli", "bench", "serve", "--manager", cluster.address(), "--json", *load.flags()]
    process = Process("bench", command, log, {})
    return await process.ended(_BENCH_S), process.log


def _figures(output: str) -> dict[str, Any]:
    """The main figures of its JSON, and the whole."""
    (line,) = [line for line in output.splitlines() if line.startswith("{")]
    found = json.loads(line)
    case = found["cases"]["cold"]
    runs = case["runs"]
    return {
        "generated_tokens_per_s": sum(run["num_generated_tokens"] for run in runs)
        / sum(run["seconds"] for run in runs),
        "first_token_ms": case["time_to_first_token"]["mean_ms"],
        "inter_token_ms": case["inter_token"]["mean_ms"],
        "bench": found,
    }


def _decode_floor_ms(shape: Shape, load: _Load, speeds: Speeds) -> float:
    """Least time between two tokens while all users decode, in the middle of their answers, each reading all of its KV."""
    context = load.prefix_tokens + load.own_tokens + load.generated_tokens // 2
    least = ModelSizes.of(build(shape, torch.bfloat16, torch.device("meta"))).cost(load.users, 1, context)
    return 1e3 * speeds.floor_s(least.num_bytes, least.num_flop)


async def _engine_totals(port: int) -> dict[str, float]:
    """The worker's counters of steps."""
    page = await scrape(f"http://127.0.0.1:{port}/metrics")
    return {
        "steps": page.value("kvpool_worker_step_duration_seconds_count"),
        "step_s": page.value("kvpool_worker_step_duration_seconds_sum"),
        "at_s": time.monotonic(),
    }


def _differences(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Of a run with its warm-up: steps, their time, and the time without a step."""
    steps, step_s, all_s = (after[name] - before[name] for name in ("steps", "step_s", "at_s"))
    return {"steps": steps, "step_ms": 1e3 * step_s / max(1.0, steps), "share_of_time_in_steps": step_s / all_s}
