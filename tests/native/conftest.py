"""The compiled step, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from kvpool.worker_service.native.cpu import build_cache, prebuilt
from kvpool.worker_service.native.cpu.build_cache import compiled_library
from kvpool.worker_service.native.cpu.compiler import NumberType
from kvpool.worker_service.native.cpu.trial import why_it_does_not_run


@pytest.fixture(scope="session")
def build_folder(pytestconfig: pytest.Config) -> Path:
    """In pytest's cache folder: what is compiled serves later runs."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("native")


@pytest.fixture(scope="session")
def step_file() -> Callable[[NumberType], Path]:
    """The step, compiled as a worker does it, in the user's cache folder: workers of other tests load the same file."""
    return lambda number_type: compiled_library(number_type, default_cache_dir(), print).path


@pytest.fixture(scope="session")
def real_file(step_file: Callable[[NumberType], Path]) -> Path:
    """The float32 step, compiled by this machine's compiler."""
    return step_file("float32")


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


@pytest.fixture
def lines() -> list[str]:
    """Of progress."""
    return []


@pytest.fixture(scope="session")
def trials() -> dict[bytes, str | None]:
    """What the trial of each file has said, by the file's content."""
    return {}


@pytest.fixture(autouse=True)
def equal_files_are_tried_once(trials: dict[bytes, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial is a process, and most tests put copies of the same file in a worker's way."""

    def tried(file: Path) -> str | None:
        content = file.read_bytes()
        if content not in trials:
            trials[content] = why_it_does_not_run(file)
        return trials[content]

    for module in (build_cache, prebuilt):
        monkeypatch.setattr(module, "why_it_does_not_run", tried)
