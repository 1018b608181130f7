"""The part step: one step of a worker's runner with random weights, compared with the device's measured speed."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from bench.floors import ModelSizes
from bench.stopwatch import Stopwatch, timed_calls
from kvpool.v1 import worker_pb2
from kvpool.worker_service.attention import torch_backend
from kvpool.worker_service.attention.layer import AttentionBackend
from kvpool.worker_service.attention.packing import Packer, StepSizes
from kvpool.worker_service.model.device import enter_device
from kvpool.worker_service.model.forward import runner as runner_module
from kvpool.worker_service.model.forward.kv_plan import KVCachePlan
from kvpool.worker_service.model.forward.modules import RowSelector, modules_of
from kvpool.worker_service.model.forward.runner import ModelRunner
from kvpool.worker_service.model.guard.support import guarded
from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.model.memory.facts import kv_bytes_per_token
from kvpool.worker_service.step import SamplingParams, SequencePart, Step

from .cases import AddRow, Case, attempt
from .profile import profile_of
from .results import Row
from .setup import Setup
from .shapes import MAX_MODEL_LEN, Shape, build, shapes
from .speeds import Speeds, measure_speeds, synchronize

_DTYPE: Final = torch.bfloat16
_BLOCK_SIZE: Final = 16
_GREEDY: Final = SamplingParams()
_DRAWN: Final = SamplingParams(temperature=1.0, top_p=0.9, seed=1)
_WARM_UPS: Final = 3


@dataclass(frozen=True, slots=True)
class _Sizes:
    batches: tuple[int, ...]
    context: int
    """Tokens before a decode."""
    prompt_tokens: int
    """New tokens of a prefill step, of all sequences together."""
    runs: int


_FULL: Final = _Sizes((1, 16, 64), 1024, 2048, 10)
_TINY: Final = _Sizes((1, 4), 24, 32, 2)


def cases(setup: Setup) -> Sequence[Case]:
    """One per shape, so that each can use all of the device's memory."""
    return [
        Case(f"step {shape.name}", _measure, (shape,), needs_fresh_process=not setup.is_tiny)
        for shape in shapes(setup.is_tiny)
    ]


def _measure(setup: Setup, add_row: AddRow, shape: Shape) -> None:
    device = torch.device(setup.device)
    enter_device(device)
    sizes = _TINY if setup.is_tiny else _FULL
    speeds = measure_speeds(device, setup.is_tiny)
    loaded = _loaded(shape, device)
    log: list[str] = []
    backend = loaded.attention_backend("auto", _BLOCK_SIZE, log.append)
    assert backend is not None
    blocks_per_sequence = -(-(max(sizes.context, sizes.prompt_tokens) + 1) // _BLOCK_SIZE)
    num_blocks = 1 + max(sizes.batches) * -(-(sizes.context + 1) // _BLOCK_SIZE) + blocks_per_sequence
    plan = KVCachePlan.one_group(num_blocks, _BLOCK_SIZE, kv_bytes_per_token(loaded.runtime.layers, _DTYPE))
    runner = loaded.runner(plan, backend, StepSizes(max(sizes.batches), sizes.prompt_tokens, blocks_per_sequence))
    add_row(Row(f"{shape.name} backend", figures={"chosen": log[0]}))
    bench = _Bench(loaded, runner, backend, speeds, device, sizes.runs)
    for batch in sizes.batches:
        for kind, num_new, num_before, sampling in (
            ("decode", 1, sizes.context, _GREEDY),
            ("prefill", max(1, sizes.prompt_tokens // batch), 0, _GREEDY),
            ("decode with top-p", 1, sizes.context, _DRAWN),
        ):
            name = f"{shape.name} {kind} batch {batch}"
            shown = (name, batch, num_new, num_before, sampling)
            attempt(add_row, name, lambda shown=shown: bench.row(*shown))  # type: ignore[misc]
    runner.close()


def _loaded(shape: Shape, device: torch.device) -> LoadedModel:
    """A LoadedModel without files."""
    model = build(shape, _DTYPE, device)
    runtime = guarded(model, model.config, _DTYPE, device, MAX_MODEL_LEN)
    facts = worker_pb2.ModelFacts(vocab_size=model.config.vocab_size, max_model_len=MAX_MODEL_LEN)
    return LoadedModel(facts, {}, None, runtime)


@dataclass(frozen=True, slots=True)
class _Bench:
    """A model bound to its KV cache."""

    loaded: LoadedModel
    runner: ModelRunner
    backend: AttentionBackend
    speeds: Speeds
    device: torch.device
    runs: int

    def row(self, name: str, batch: int, num_new: int, num_before: int, sampling: SamplingParams) -> Row:
        """Time of the step, the least time by the device's speed, and the host's time by section."""
        step = _step(batch, num_new, num_before, sampling, self.loaded.facts.vocab_size)
        seconds = self._seconds(step)
        least = ModelSizes.of(modules_of(self.loaded.runtime)).cost(batch, num_new, num_before)
        floor_s = self.speeds.floor_s(least.num_bytes, least.num_flop)
        median_s = statistics.median(seconds)
        figures: dict[str, Any] = {
            "median_ms": median_s * 1e3,
            "floor_ms": floor_s * 1e3,
            "of_roofline": floor_s / median_s,
            "tokens_per_s": batch * num_new / median_s,
            "runs_ms": [second * 1e3 for second in seconds],
            "floor": {
                "gb": least.num_bytes / 1e9,
                "gflop": least.num_flop / 1e9,
                "copy_gb_per_s": self.speeds.copy_bytes_per_s / 1e9,
                "bf16_tflop_per_s": self.speeds.products_flop_per_s / 1e12,
                "of_copy_bandwidth": least.num_bytes / self.speeds.copy_bytes_per_s / median_s,
            },
            "host_ms": self._host_ms(step),
            "profile": profile_of(lambda: self.runner.execute(step), self.device),
        }
        return Row(name, figures=figures)

    def _seconds(self, step: Step) -> list[float]:
        """Times of the step; it ends when its tokens are on the host."""
        for _ in range(_WARM_UPS):
            self.runner.execute(step)
        seconds = []
        for _ in range(self.runs):
            synchronize(self.device)
            began = time.perf_counter()
            self.runner.execute(step)
            seconds.append(time.perf_counter() - began)
        return seconds

    def _host_ms(self, step: Step) -> dict[str, float]:
        """The host's time in a step by section, in ms. On a GPU it only launches; it waits in the section that reads a result."""
        watch = Stopwatch()
        with timed_calls(
            watch,
            (Packer, "pack", "pack"),
            (self.backend, "begin", "attention begin"),
            (self.backend, "attend", "attention"),
            (torch_backend, "build_view", "attention plan"),
            (RowSelector, "run", "forward"),
            (runner_module, "sample", "sample"),
        ):
            began = time.perf_counter()
            for _ in range(self.runs):
                self.runner.execute(step)
            total = time.perf_counter() - began
        spent = {kind: seconds / self.runs * 1e3 for kind, seconds in watch.seconds.items()}
        return {**spent, "everything else": total / self.runs * 1e3 - sum(spent.values())}


def _step(batch: int, num_new: int, num_before: int, sampling: SamplingParams, vocab_size: int) -> Step:
    """Sequences that share no blocks."""
    blocks = itertools.count(1)
    count = -(-(num_before + num_new) // _BLOCK_SIZE)
    return Step(
        [
            SequencePart(
                token_ids=[(7 * number + 13 * index) % vocab_size for index in range(num_new)],
                start=num_before,
                block_tables=(list(itertools.islice(blocks, count)),),
                sampling=sampling,
            )
            for number in range(batch)
        ]
    )
