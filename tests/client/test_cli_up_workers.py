"""What `kvpool up` hands on to its workers behind `--`, and what it does when they cannot use it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpool.client.cli.commands.up import UpSettings
from kvpool.client.cli.launch.cluster import ClusterSpec, free_port
from kvpool.process.settings import SettingsProblem, load_settings
from kvpool.worker_service.settings import WorkerSettings


def spec(own: Sequence[str], further: Sequence[str]) -> ClusterSpec:
    return load_settings(UpSettings, ["--device", "cpu", *own]).spec(further)


def test_each_worker_gets_it_beside_what_up_settles() -> None:
    """As a worker understands its arguments. A value that is called like a setting of up is no setting."""
    further = [
        "--scheduling-policy",
        "priority",
        "--gpu-memory-utilization=0.5",
        "--cache-dir",
        "model",
        "--no-prefix-caching",
    ]
    manager, *workers = spec(["--workers", "2", "--num-blocks", "33"], further).children({})
    assert not set(further) & set(manager.command)
    for index, worker in enumerate(workers):
        settings = load_settings(WorkerSettings, worker.command[worker.command.index("-m") + 2 :])
        assert (settings.scheduling_policy, settings.gpu_memory_utilization) == ("priority", 0.5)
        assert (settings.cache_dir, settings.prefix_caching) == (Path("model"), False)
        assert (settings.worker_id, settings.num_blocks, settings.device) == (f"worker-{index}", 33, "cpu")


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--model", "give --model before"),
        ("--host=::1", "give --host before"),
        ("--metrics-port", "give --metrics-port before"),
        ("--manager", "give --join before"),
        ("--worker-id=w", "give --name before"),
        ("--dry-run", "`kvpool worker --dry-run`"),
    ],
)
def test_what_up_settles_itself_is_refused_with_the_way_to_say_it(flag: str, instead: str) -> None:
    with pytest.raises(SettingsProblem, match=instead):
        spec([], ["--max-num-waiting", "9", flag])


def test_a_single_worker_may_be_given_its_port() -> None:
    (worker,) = spec(["--join", "10.0.0.1:50051"], ["--port", "7001"]).children({})
    settings = load_settings(WorkerSettings, worker.command[worker.command.index("-m") + 2 :])
    assert (settings.port, settings.manager) == (7001, "10.0.0.1:50051")


def run_up(state_dir: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Of a cluster that must not come to its start: the manager would keep its epoch in `state_dir`."""
    command = [
        sys.executable,
        "-m",
        "kvpool.client.cli",
        "up",
        "--port",
        str(free_port()),
        "--state-dir",
        str(state_dir),
    ]
    done = subprocess.run(
        ["env", *(f"{name}={value}" for name, value in variables.items()), *command, *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert list(state_dir.iterdir()) == []
    return done


@pytest.mark.parametrize(
    ("arguments", "variables", "says"),
    [
        (
            ["--", "--schedulling-policy", "priority"],
            {},
            "error: unrecognized arguments: --schedulling-policy priority",
        ),
        (
            ["--", "--scheduling-policy", "fair"],
            {},
            "--scheduling-policy: Input should be 'fcfs' or 'priority', got 'fair'",
        ),
        (["--block-size", "17"], {}, "--block-size must be a power of two, got 17"),
        ([], {"KVPOOL_WORKER_MAX_NUM_SEQS": "0"}, "KVPOOL_WORKER_MAX_NUM_SEQS: Input should be greater"),
    ],
)
def test_a_worker_s_own_error_and_status_come_before_anything_is_started(
    arguments: list[str], variables: dict[str, str], says: str, tmp_path: Path
) -> None:
    done = run_up(tmp_path, *arguments, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("kvpool worker: ")
    assert says in done.stderr.splitlines()[-1]


def test_a_worker_s_setting_before_the_dashes_is_told_where_it_belongs(tmp_path: Path) -> None:
    done = run_up(tmp_path, "--workers", "2", "--scheduling-policy", "priority")
    assert done.returncode == 2
    assert "give it behind --: kvpool up … -- --scheduling-policy …" in done.stderr.splitlines()[-1]


def test_help_behind_the_dashes_is_the_worker_s(tmp_path: Path) -> None:
    done = run_up(tmp_path, "--", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: kvpool worker " in done.stdout
    assert "--max-mixed-prefill-tokens" in done.stdout
