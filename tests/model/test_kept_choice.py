"""The file that keeps which runtime is faster: whole, and for its key, or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpool.worker_service.model.native.comparison import Choice, ChoiceFile, NotKept
from kvpool.worker_service.model.native.timing import StepSeconds

KEY: dict[str, str | int] = {"fingerprint": "f", "native_threads": 2}
CHOICE = Choice("torch", StepSeconds(1.5, 0.25), StepSeconds(0.5, 0.5))


@pytest.fixture
def file(tmp_path: Path) -> ChoiceFile:
    kept = ChoiceFile(tmp_path, KEY)
    kept.keep(CHOICE)
    return kept


def test_a_choice_is_kept_for_its_key(file: ChoiceFile) -> None:
    assert file.read() == CHOICE
    assert list(file.path.parent.iterdir()) == [file.path]
    assert ChoiceFile(file.cache_dir, {**KEY, "native_threads": 3}).read() is None


def test_a_torn_choice_is_none(file: ChoiceFile) -> None:
    content = file.path.read_bytes().rstrip()
    for length in range(len(content)):
        file.path.write_bytes(content[:length])
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
    """As another version could have written it."""
    file.path.write_text(json.dumps({**json.loads(file.path.read_bytes()), **change}))
    assert file.read() is None


@pytest.mark.parametrize("content", [b"[]", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_none(content: bytes, file: ChoiceFile) -> None:
    file.path.write_bytes(content)
    assert file.read() is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "runtimes").symlink_to("/proc/self/task")  # not even root can write there
    file = ChoiceFile(tmp_path, KEY)
    with pytest.raises(NotKept, match=rf"{file.path} cannot be written: "):
        file.keep(CHOICE)
    assert file.read() is None
