"""The state folder: incarnations grow whatever the wall clock does, one process at a time, and a loss is survived."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvpool.process.settings import load_settings
from kvpool.worker_service import incarnation as module
from kvpool.worker_service.incarnation import MAX_INCARNATION, Identity, WorkerState, WorkerStateError
from kvpool.worker_service.settings import WorkerSettings

HOUR_NS = 3600 * 10**9
NOW_NS = 1_800_000_000 * 10**9


def begin(folder: Path | None, now_ns: int = NOW_NS, *, is_required: bool = False) -> Identity:
    """One short life of a worker."""
    state = WorkerState.open(folder, is_required=is_required, wait_seconds=0.0, wall_clock=lambda: now_ns)
    state.close()
    return state.identity


def test_an_incarnation_is_the_time_or_one_more_than_the_last(tmp_path: Path) -> None:
    """Also when the wall clock was an hour ahead and is put back, and when it stands still."""
    clock = [NOW_NS, NOW_NS + HOUR_NS, NOW_NS, NOW_NS, NOW_NS + 2 * HOUR_NS]
    found = [begin(tmp_path / "a" / "b", now_ns).incarnation for now_ns in clock]
    assert found == [NOW_NS, NOW_NS + HOUR_NS, NOW_NS + HOUR_NS + 1, NOW_NS + HOUR_NS + 2, NOW_NS + 2 * HOUR_NS]


def test_a_process_knows_the_key_of_the_one_before_it_and_has_its_own(tmp_path: Path) -> None:
    lives = [begin(tmp_path) for _ in range(3)]
    assert lives[0].predecessor_key == b""
    assert [life.predecessor_key for life in lives[1:]] == [life.process_key for life in lives[:-1]]
    assert len({life.process_key for life in lives}) == 3
    assert all(len(life.process_key) == 16 for life in lives)


def test_the_key_is_nobody_else_s_to_read(tmp_path: Path) -> None:
    begin(tmp_path / "state")
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "state" / "incarnation").stat().st_mode) == 0o600


def process_of(script: str, folder: Path) -> subprocess.Popen[str]:
    """Another process, which runs the script with the folder as its argument."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", "common"])}
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_second_process_is_refused_as_long_as_the_first_lives(tmp_path: Path) -> None:
    """Another process holds the lock; the kernel gives it back when that one dies, however that happens."""
    script = (
        "import sys, time; from pathlib import Path; from kvpool.worker_service.incarnation import WorkerState; "
        "state = WorkerState.open(Path(sys.argv[1])); print(state.identity.process_key.hex(), flush=True); time.sleep(600)"
    )
    first = process_of(script, tmp_path)
    assert first.stdout is not None
    try:
        key = first.stdout.readline().strip()
        for is_required in (False, True):
            with pytest.raises(WorkerStateError) as caught:
                begin(tmp_path, is_required=is_required)
            assert f"process {first.pid} runs this worker already" in str(caught.value)
            assert "--worker-id" in str(caught.value)
            assert str(tmp_path) in str(caught.value)
    finally:
        first.kill()
        first.communicate()
    assert begin(tmp_path).predecessor_key.hex() == key


def test_a_process_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    """It ends when the process after it has said in its log that it waits."""
    script = (
        "import sys; from pathlib import Path; from kvpool.process.logs import LogFormat, LogLevel, configure_logging; "
        "from kvpool.worker_service.incarnation import WorkerState; configure_logging(LogFormat.json, LogLevel.info); "
        "state = WorkerState.open(Path(sys.argv[1]), wait_seconds=60.0); print(state.identity.predecessor_key.hex())"
    )
    first = WorkerState.open(tmp_path)
    process = process_of(script, tmp_path)
    try:
        assert process.stderr is not None
        assert f"process {os.getpid()} still runs this worker: waiting for its end" in process.stderr.readline()
        first.close()
        first.close()
        assert process.communicate(timeout=60) == (f"{first.identity.process_key.hex()}\n", "")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\0" * 60,
        b"kvpool worker 12",
        b"kvpool worker 12 00000000000000000000000000000000 00000000\n",
        module._encode(12, bytes(16))[:-1],
        module._encode(MAX_INCARNATION, bytes(16)),
        module._encode((1 << 63) + 5, bytes(16)),
        bytes(range(192, 256)),
    ],
)
def test_a_damaged_file_is_logged_and_begun_anew(tmp_path: Path, damage: bytes) -> None:
    """Also in a folder that was named: the manager makes the worker wait for a lease, that is all."""
    begin(tmp_path)
    (tmp_path / "incarnation").write_bytes(damage)
    with capture_logs() as lines:
        identity = begin(tmp_path, is_required=True)
    assert identity.predecessor_key == b""
    assert identity.incarnation == NOW_NS
    assert [line["log_level"] for line in lines] == ["warning"]
    assert str(tmp_path / "incarnation") in lines[0]["path"]
    assert begin(tmp_path).predecessor_key == identity.process_key


def test_a_folder_that_cannot_be_used_is_fatal_only_if_it_was_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = tmp_path / "file" / "state"
    with capture_logs() as lines:
        identity = begin(folder)
    assert (identity.incarnation, identity.predecessor_key) == (NOW_NS, b"")
    (line,) = lines
    assert str(folder) in line["event"]
    assert "--state-dir" in line["cure"]
    with pytest.raises(
        WorkerStateError, match=r"file/state cannot be used: Not a directory; give .* another --state-dir"
    ):
        begin(folder, is_required=True)


def test_a_file_that_cannot_be_written_leaves_no_lock_behind(tmp_path: Path) -> None:
    (tmp_path / "incarnation.tmp").mkdir()
    with capture_logs() as lines:
        assert begin(tmp_path).predecessor_key == b""
    assert len(lines) == 1
    (tmp_path / "incarnation.tmp").rmdir()
    begin(tmp_path, is_required=True)


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert begin(None).incarnation == NOW_NS
    assert list(tmp_path.iterdir()) == []


# -- where it is


def folder_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> Path | None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return load_settings(WorkerSettings, arguments).state_folder(7001)


def test_each_worker_of_each_manager_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names are unique in a cluster, not on a machine; none leads out of the folder, and none is too long for a file system."""
    strange = ["worker-0", "..", ".", "a/b", "a%2Fb", "é" * 64, "é" * 63 + "è", "\x1b[31m"]
    found = [folder_of(monkeypatch, tmp_path, f"--worker-id={name}") for name in strange]
    found += [folder_of(monkeypatch, tmp_path, "--worker-id=worker-0", "--manager=10.0.0.1:50051")]
    assert found[0] == tmp_path / "kvpool" / "workers" / "127.0.0.1:50051" / "worker-0"
    assert len(set(found)) == len(found)
    for folder in found:
        assert folder is not None
        assert folder.resolve().parent.parent == (tmp_path / "kvpool" / "workers").resolve()
        folder.mkdir(parents=True)


def test_a_name_that_is_made_up_at_every_start_has_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert folder_of(monkeypatch, tmp_path) is None
    named = load_settings(WorkerSettings, ["--port", "7001"]).state_folder(7001)
    assert named is not None
    assert named.name.endswith("-7001")
    assert folder_of(monkeypatch, tmp_path, f"--state-dir={tmp_path / 'own'}") == tmp_path / "own"
