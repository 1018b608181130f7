"""`--runtime auto` on a CPU with a matrix unit that only torch uses: the faster runtime, and the same one after a restart."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpool.worker_service.model import runtimes
from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.forward.contract import Runtime
from kvpool.worker_service.model.forward.modules import ModulesRuntime
from kvpool.worker_service.model.forward.native import NativeRuntime
from kvpool.worker_service.model.load import LoadedModel, load_model
from kvpool.worker_service.model.native import comparison
from kvpool.worker_service.model.native import load as native_load
from kvpool.worker_service.model.native.timing import Measure, StepSeconds, TimedWorkload
from kvpool.worker_service.model.settings import ModelSettings
from kvpool.worker_service.native.cpu import cpu_info
from tests.model.paged import loaded_models, next_token
from tests.tiny_models import build_model, make_tiny_model

pytestmark = pytest.mark.native

WORKLOAD = TimedWorkload(8, 409, 102)
"""Within the 512 tokens of a tiny model."""
PROMPT = range(20)
SLOW = StepSeconds(prefill=0.4, decode=0.01)
FAST_PREFILL = StepSeconds(prefill=0.1, decode=0.02)
MIDDLE = StepSeconds(prefill=0.2, decode=0.01)


@dataclass
class Stopwatch:
    """A Measure that reports these figures, and counts."""

    of_native: StepSeconds
    of_torch: StepSeconds
    timed: list[str] = field(default_factory=list)

    def __call__(self, runtime: Runtime, block_size: int, workload: TimedWorkload) -> StepSeconds:
        assert workload == WORKLOAD
        is_native = isinstance(runtime, NativeRuntime)
        self.timed.append("native" if is_native else "torch")
        return self.of_native if is_native else self.of_torch


class Worker:
    """Starts of a worker with one cache folder, on a CPU with AMX and with a step that does not use it."""

    def __init__(self, model: Path, cache_dir: Path) -> None:
        self.settings = ModelSettings(str(model), "bfloat16", "cpu", cache_dir=cache_dir)
        self.lines: list[str] = []

    def start(self, measure: Measure, *, num_threads: int = 1, **changes: Any) -> LoadedModel:
        self.lines = []
        torch.set_num_threads(num_threads)
        return load_model(replace(self.settings, **changes), self.lines.append, measure)

    def chooses(self, kind: type[Runtime], stopwatch: Stopwatch, *timed: str, **changes: Any) -> LoadedModel:
        """A start with this runtime, for which these were timed."""
        loaded = self.start(stopwatch, **changes)
        assert isinstance(loaded.runtime, kind)
        assert stopwatch.timed == list(timed)
        return loaded

    def restart(self, kind: type[Any]) -> LoadedModel:
        """Nothing may be timed."""
        return self.chooses(kind, Stopwatch(SLOW, SLOW))

    def line(self, beginning: str) -> str:
        (found,) = [line for line in self.lines if line.startswith(beginning)]
        return found

    @property
    def kept(self) -> list[Path]:
        assert self.settings.cache_dir is not None
        return list((self.settings.cache_dir / "runtimes").glob("*"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama")).path


@pytest.fixture
def worker(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    have_matrix_unit("amx_bf16", monkeypatch)
    have_tiles(False, monkeypatch)
    return Worker(llama, tmp_path / "cache")


def have_matrix_unit(flag: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_info, "matrix_unit", lambda number_type: flag if number_type == "bfloat16" else None)


def have_tiles(has_tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every step that is loaded."""
    select = native_load._library
    monkeypatch.setattr(native_load, "_library", lambda *rest: replace(select(*rest), has_tiles=has_tiles))


@pytest.mark.parametrize(
    ("native", "kind", "shown"),
    [
        # 8 · 0.4 + 102 · 0.01 and 8 · 0.1 + 102 · 0.02
        (
            SLOW,
            ModulesRuntime,
            "runtime: torch; not native: torch is faster on this CPU with amx_bf16, for 8 requests of "
            "409 + 102 tokens: native 4.22 s (prefill 0.4 s, decode 0.01 s), torch 2.84 s (prefill 0.1 s, decode 0.02 s); ",
        ),
        # torch's prefill is twice as fast, but a request is not
        (
            MIDDLE,
            NativeRuntime,
            "runtime: native; not torch: native is faster on this CPU with amx_bf16, for 8 requests of "
            "409 + 102 tokens: native 2.62 s (prefill 0.2 s, decode 0.01 s), torch 2.84 s (prefill 0.1 s, decode 0.02 s); ",
        ),
    ],
    ids=["torch", "native"],
)
def test_the_faster_runtime_serves_and_a_restart_makes_the_same_choice(
    native: StepSeconds, kind: type[Runtime], shown: str, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = loaded_models(monkeypatch)
    first = worker.chooses(kind, Stopwatch(native, FAST_PREFILL), "native", "torch")
    (file,) = worker.kept
    assert worker.line(shown) == f"{shown}timed now, kept in {file}"
    assert worker.line("runtime: this CPU has amx_bf16, which torch uses and the native step does not")
    assert len(models) == (3 if kind is NativeRuntime else 2)
    answer = next_token(first, PROMPT)
    del first
    models.clear()
    again = worker.restart(kind)
    assert worker.line(shown) == f"{shown}kept in {file}"
    assert len(models) == 1
    assert next_token(again, PROMPT) == answer


@pytest.mark.parametrize("changes", [{"num_threads": 2}, {"max_num_seqs": 8, "model": "another"}], ids=str)
def test_what_the_choice_depends_on_is_timed_again(changes: dict[str, Any], worker: Worker, tmp_path: Path) -> None:
    worker.start(Stopwatch(SLOW, FAST_PREFILL))
    if "model" in changes:
        build_model("llama", 1234).save_pretrained(tmp_path / "another")
        changes = {**changes, "model": str(tmp_path / "another")}
    worker.chooses(NativeRuntime, Stopwatch(MIDDLE, FAST_PREFILL), "native", "torch", **changes)
    assert len(worker.kept) == 2
    worker.restart(ModulesRuntime)


@pytest.mark.parametrize(
    ("changes", "flag", "has_tiles"),
    [
        ({}, None, False),
        ({}, "amx_bf16", True),
        ({"dtype": "float32"}, "amx_bf16", False),
        ({"runtime": "native"}, "amx_bf16", False),
        ({"runtime": "torch"}, "amx_bf16", False),
        ({"quantize": "int8"}, "amx_bf16", False),
    ],
    ids=["no matrix unit", "the step uses it", "not for this type", "--runtime native", "--runtime torch", "int8"],
)
def test_nothing_is_timed_where_there_is_nothing_to_choose(
    changes: dict[str, Any], flag: str | None, has_tiles: bool, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_matrix_unit(flag, monkeypatch)
    have_tiles(has_tiles, monkeypatch)
    models = loaded_models(monkeypatch)
    kind = ModulesRuntime if changes.get("runtime") == "torch" else NativeRuntime
    worker.chooses(kind, Stopwatch(SLOW, FAST_PREFILL), **changes)
    assert worker.kept == []
    assert len(models) == 1


def test_a_model_that_is_not_native_is_not_timed(worker: Worker, tmp_path: Path) -> None:
    path = make_tiny_model("gpt_oss", tmp_path / "gpt_oss").path
    worker.chooses(ModulesRuntime, Stopwatch(SLOW, FAST_PREFILL), model=str(path))


@pytest.mark.parametrize("fails", ["native", "torch"])
def test_a_runtime_that_cannot_be_timed_leaves_the_native_one(
    fails: str, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is kept: the next start may do better."""
    models = loaded_models(monkeypatch)
    stopwatch = Stopwatch(SLOW, FAST_PREFILL)

    def measure(runtime: Runtime, *rest: Any) -> StepSeconds:
        if isinstance(runtime, NativeRuntime) == (fails == "native"):
            raise RuntimeError("could not create a primitive")
        return stopwatch(runtime, *rest)

    loaded = worker.start(measure)
    assert isinstance(loaded.runtime, NativeRuntime)
    next_token(loaded, PROMPT)
    assert worker.line(f"runtime: native; {fails} could not be timed: RuntimeError: could not create a primitive")
    assert worker.kept == []
    assert len(models) == (1 if fails == "native" else 3)


def test_a_model_that_torch_cannot_serve_is_native(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: Any) -> Any:
        raise ModelError("its logits differ")

    loaded_models(monkeypatch)
    monkeypatch.setattr(runtimes, "guarded", refusing)
    assert isinstance(worker.start(Stopwatch(SLOW, FAST_PREFILL)).runtime, NativeRuntime)
    assert worker.line("runtime: native; torch cannot serve this model: its logits differ")
    assert worker.kept == []


def test_a_choice_that_cannot_be_kept_is_made_at_each_start(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path, content: bytes) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(comparison, "write_atomically", failing)
    for native, kind in ((SLOW, ModulesRuntime), (MIDDLE, NativeRuntime)):
        worker.chooses(kind, Stopwatch(native, FAST_PREFILL), "native", "torch")
        (line,) = [line for line in worker.lines if "timed at each start, not kept" in line]
        assert line.endswith(" cannot be written: Read-only file system. Give another --cache-dir, or mend this one")


def test_a_choice_that_another_worker_has_kept_meanwhile_comes_first(worker: Worker, tmp_path: Path) -> None:
    """Workers that start together make one choice, so that each makes it again after a restart."""
    other = Worker(Path(worker.settings.model), worker.settings.cache_dir)  # type: ignore[arg-type]
    stopwatch = Stopwatch(SLOW, FAST_PREFILL)

    def measure(runtime: Runtime, *rest: Any) -> StepSeconds:
        if not isinstance(runtime, NativeRuntime):
            other.start(Stopwatch(MIDDLE, FAST_PREFILL))
        return stopwatch(runtime, *rest)

    assert isinstance(worker.start(measure).runtime, NativeRuntime)
    assert worker.line("runtime: native; not torch: ").endswith(f"another worker's choice, kept in {worker.kept[0]}")
