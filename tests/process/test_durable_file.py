"""A file that is replaced holds the old content or the new one, whatever stops the machine, and the new one after the call."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest

from kvpool.process import durable_file
from kvpool.process.durable_file import write_durably
from tests.simulation import disk as simulated


def test_what_a_crash_has_left_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"old")
    (tmp_path / "state.tmp").write_bytes(b"a longer one that was never finished")
    write_durably(tmp_path / "state", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"state": b"new"}


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_the_file_has_its_mode_from_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    found: list[int] = []
    fsync = os.fsync

    def note_fsync(descriptor: int) -> None:
        found.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_fsync)
    before = os.umask(0o022)
    try:
        write_durably(tmp_path / "state", b"new", mode=mode)
    finally:
        os.umask(before)
    assert found[0] == stat.S_IMODE((tmp_path / "state").stat().st_mode) == mode


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_disk_that_fails_leaves_the_old_content_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "state").write_bytes(b"old")
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="No space left"):
        write_durably(tmp_path / "state", b"new")
    assert os.listdir("/proc/self/fd") == before
    assert (tmp_path / "state").read_bytes() == b"old"


@pytest.mark.parametrize("num_operations", [*range(8), None])
def test_a_loss_of_power_at_any_moment_leaves_one_content_or_the_other(
    monkeypatch: pytest.MonkeyPatch, num_operations: int | None
) -> None:
    """On the simulator's disk, which loses or tears what was not synced. None: the power goes after the return."""
    found = set()
    for seed in range(50):
        disk = simulated.Disk(random.Random(seed))
        path: Any = simulated.Path(disk, "state")
        monkeypatch.setattr(durable_file, "os", disk)
        monkeypatch.setattr(durable_file, "open", disk.open, raising=False)
        write_durably(path, b"old")
        disk.operations_left = num_operations
        expected = {b"new"}
        try:
            write_durably(path, b"new")
        except simulated.PowerLoss:
            expected = {b"old", b"new"}
        disk.lose_power()
        assert path.read_bytes() in expected
        found.add(path.read_bytes())
    assert (b"old" in found) is (num_operations is not None and num_operations < 6), (
        "six operations, each may be the last"
    )
