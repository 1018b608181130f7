"""What `--runtime auto` times, in what units, and the file that keeps which runtime is faster: whole, and for its key, or none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpool.worker_service.model.native.comparison import Choice, ChoiceFile
from kvpool.worker_service.model.native.timing import StepSeconds, TimedWorkload, measure_runtime
from kvpool.worker_service.model.settings import RuntimeName
from tests.model.paged import load, recorded_steps
from tests.tiny_models import make_tiny_model


def clock_of(seconds: Sequence[float]) -> Iterator[float]:
    """Readings: every run between two of them takes the next of these seconds."""
    now = 100.0
    for each in seconds:
        yield now
        now += each
        yield now


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((8192, 2048, 64), (8, 512, 128)),
        ((8192, 100, 64), (8, 100, 25)),
        ((200, 2048, 64), (8, 160, 40)),
        ((8192, 2048, 3), (3, 512, 128)),
        ((2, 1, 1), (1, 1, 1)),
    ],
)
def test_the_workload_keeps_to_the_limits_of_the_worker(
    limits: tuple[int, int, int], expected: tuple[int, int, int]
) -> None:
    assert TimedWorkload.within(*limits) == expected


@pytest.mark.parametrize("runtime", [pytest.param("native", marks=pytest.mark.native), "torch"])
@pytest.mark.parametrize(("block_size", "prompt_tokens"), [(4, 32), (16, 27), (16, 1)])
def test_the_fastest_run_of_each_step_counts(
    runtime: RuntimeName, block_size: int, prompt_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run of a step prepares it, and others may be disturbed. Each step is one of the workload's."""
    loaded = load(make_tiny_model("llama", tmp_path).path, dtype="bfloat16", runtime=runtime)
    steps = recorded_steps(monkeypatch)
    for _ in range(2):  # the model is free again after the first time
        clock = clock_of([9, 3, 8, 7, 2, 6, 5])
        workload = TimedWorkload(3, prompt_tokens, 8)
        found = measure_runtime(loaded.runtime, block_size, workload, clock.__next__)
        assert found == StepSeconds(prefill=3, decode=2)
        assert next(clock, None) is None
    prefill, decode = [(0, prompt_tokens)], 3 * [(prompt_tokens, 1)]
    computed = [[(part.start, len(part.token_ids)) for part in step.parts] for step in steps]
    assert computed == 2 * [*2 * [prefill], *5 * [decode]]


# -- the file


KEY: dict[str, str | int] = {"fingerprint": "f", "native_threads": 2}
CHOICE = Choice(key=KEY, runtime="torch", native=StepSeconds(1.5, 0.25), torch=StepSeconds(0.5, 0.5))


@pytest.fixture
def file(tmp_path: Path) -> ChoiceFile:
    kept = ChoiceFile(tmp_path, KEY)
    kept.keep(CHOICE)
    return kept


def test_a_choice_is_kept_for_its_key(file: ChoiceFile) -> None:
    assert file.read() == CHOICE
    assert list(file.path.parent.iterdir()) == [file.path]
    assert ChoiceFile(file.cache_dir, {**KEY, "native_threads": 3}).read() is None


def test_a_torn_choice_and_what_is_no_object_are_none(file: ChoiceFile) -> None:
    content = file.path.read_bytes().rstrip()
    torn = [content[:length] for length in range(len(content))]
    for other in (*torn, b"[]", b"null", b"\xff", b"[" * 100_000):
        file.path.write_bytes(other)
        assert file.read() is None
    file.keep(CHOICE)
    assert file.read() == CHOICE


@pytest.mark.parametrize(
    "change",
    [
        {"runtime": "other"},
        {"runtime": ["torch"]},
        {"native": None},
        {"native": {"prefill": 1.0}},
        {"torch": {"prefill": 1.0, "decode": "fast"}},
        {"torch": {"prefill": 1.0, "decode": -1.0}},
        {"torch": {"prefill": float("nan"), "decode": 1.0}},
        {"key": {**KEY, "fingerprint": "g"}},
        {"key": None},
    ],
    ids=str,
)
def test_a_choice_with_other_fields_is_none(change: dict[str, Any], file: ChoiceFile) -> None:
    file.path.write_text(json.dumps({**json.loads(file.path.read_bytes()), **change}))
    assert file.read() is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "runtimes").symlink_to("/proc/self/task")  # not even root can write there
    file = ChoiceFile(tmp_path, KEY)
    with pytest.raises(OSError, match="runtimes"):
        file.keep(CHOICE)
    assert file.read() is None
