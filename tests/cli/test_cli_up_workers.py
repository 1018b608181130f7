"""Which flags `kvpool up` passes to its workers, and how it ends when they cannot use them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from kvpool.cli.commands.up import FLAGS, UpSettings, run_cluster
from kvpool.cli.launch.children import Children, ChildSpec
from kvpool.cli.launch.cluster import Cluster, ClusterSpec, free_port
from kvpool.cli.launch.log import Level
from kvpool.cli.launch.trial import try_settings
from kvpool.process.settings import SettingsProblem, load_settings
from kvpool.worker_service.settings import WorkerSettings
from tests.client.commands import run_kvpool
from tests.client.fakes import FakeWorker, fake_cluster
from tests.client.processes import is_alive
from tests.cluster.forked_children import forked_children
from tests.docs.programs import run_here


def spec(*arguments: str) -> ClusterSpec:
    own, of_workers = FLAGS.split(["--device", "cpu", *arguments])
    return load_settings(UpSettings, own).spec(of_workers)


def worker_settings(child: ChildSpec) -> WorkerSettings:
    """As a worker understands its arguments."""
    return load_settings(WorkerSettings, child.command[child.command.index("-m") + 2 :])


@pytest.mark.parametrize("dashes", [(), ("--",)])
def test_each_worker_gets_the_flags_that_are_not_up_s_own(dashes: tuple[str, ...]) -> None:
    """Before and after `--`. A value that is called like a setting of up is a value."""
    of_workers = ["--scheduling-policy", "priority", "--gpu-memory-utilization=0.5", "--cache-dir", "workers",
                  "--no-prefix-caching", "--num-blocks", "33"]  # fmt: skip
    manager, *workers = spec(*dashes, *of_workers, "--workers", "2", "--host=127.0.0.2").children({})
    assert not set(of_workers) & set(manager.command)
    for index, worker in enumerate(workers):
        settings = worker_settings(worker)
        assert (settings.scheduling_policy, settings.gpu_memory_utilization) == ("priority", 0.5)
        assert (settings.cache_dir, settings.prefix_caching) == (Path("workers"), False)
        assert (settings.worker_id, settings.num_blocks, settings.device) == (f"worker-{index}", 33, "cpu")
        assert settings.host == "127.0.0.2"


@pytest.mark.parametrize(
    ("flag", "instead"),
    [("--manager", "give --join"), ("--worker-id=w", "give --name"), ("--dry-run", "`kvpool worker --dry-run`")],
)
def test_what_up_sets_itself_is_refused_with_the_way_to_say_it(flag: str, instead: str) -> None:
    with pytest.raises(SettingsProblem, match=instead):
        spec("--max-num-waiting", "9", flag)


def test_a_single_worker_may_be_given_its_port() -> None:
    (worker,) = spec("--join", "10.0.0.1:50051", "--", "--port", "7001").children({})
    settings = worker_settings(worker)
    assert (settings.port, settings.manager) == (7001, "10.0.0.1:50051")


class Errors:
    """A log of `kvpool up` that keeps its own errors."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, name: str, line: str) -> None:
        """A line of a process."""

    def say(self, line: str, level: Level = Level.info, fields: Mapping[str, object] | None = None) -> None:
        if level is Level.error:
            self.lines.append(line)


async def refused(state_dir: Path, *arguments: str) -> tuple[int, list[str]]:
    """Exit status and errors of a cluster none of whose workers may start: each would make its folder in `state_dir`."""
    errors = Errors()
    started = spec("--port", str(free_port()), "--state-dir", str(state_dir), *arguments)
    with forked_children():
        status = await run_cluster(started, errors, Console(quiet=True))
    assert not (state_dir / "workers").exists()
    return status, errors.lines


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (
            ["--wokrers", "2", "--lease-seconds", "3", "--", "--schedulling-policy", "fair"],
            2,
            [
                "kvpool up: there is no flag --wokrers; did you mean --workers?",
                "kvpool up: --lease-seconds is a flag of the manager: set KVPOOL_MANAGER_LEASE_SECONDS, or",
                "kvpool up: there is no flag --schedulling-policy; did you mean --scheduling-policy?",
            ],
        ),
        (["--block-size", "17", "--workers", "3"], 2, ["kvpool worker: --block-size must be a power of two, got 17"]),
        (["--model", "/no/such"], 1, ["kvpool worker: There is no model folder '/no/such'"]),
    ],
)
async def test_what_a_worker_cannot_use_ends_it_before_a_worker_is_started(
    arguments: list[str], status: int, says: list[str], tmp_path: Path
) -> None:
    """With one line for each problem, however many workers there are, and the exit status of a worker."""
    ended, lines = await refused(tmp_path, *arguments)
    assert ended == status
    assert len(lines) == len(says)
    assert all(line.startswith(start) for line, start in zip(lines, says, strict=True)), lines


async def test_a_length_above_the_model_s_ends_it_before_a_worker_is_started(tmp_path: Path) -> None:
    """config.json is enough; the weights need not be there."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
    assert await refused(tmp_path / "state", "--model", str(tmp_path), "--max-model-len", "513") == (
        1,
        ["kvpool worker: --max-model-len 513 is not within 2 … 512, the limits of the model's config."],
    )


async def test_without_a_manager_of_its_own_it_refuses_the_same() -> None:
    """As a process."""
    done = await run_kvpool("up", "--join", f"127.0.0.1:{free_port()}", "--model", "/no/such")
    assert done.stderr.startswith("kvpool worker: There is no model folder '/no/such'")
    assert done.returncode == 1


async def test_a_dry_run_without_an_answer_is_ended(tmp_path: Path) -> None:
    """As when the hub does not answer: the workers start."""
    pid_file = tmp_path / "pid"
    script = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    await try_settings(ChildSpec("worker-0", [sys.executable, "-I", "-S", "-c", script], {}), longest_seconds=0.2)
    assert not pid_file.exists() or not is_alive(int(pid_file.read_text()))


async def test_a_worker_that_ends_while_the_others_start_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one whose settings are refused: those are the same for all."""
    fails, lives = "sys.exit('--dry-run' not in sys.argv)", "time.sleep(0 if '--dry-run' in sys.argv else 600)"
    children = [
        ChildSpec(name, [sys.executable, "-I", "-S", "-c", f"import sys, time; print('fine', flush=True); {rest}"])
        for name, rest in (("worker-0", lives), ("worker-1", fails))
    ]
    monkeypatch.setattr(ClusterSpec, "children", lambda self: children)
    worker, events = FakeWorker("worker-0"), asyncio.Queue[str]()
    async with fake_cluster(worker) as manager, Children(lambda name, line: None) as started:
        manager.workers = []

        async def serve_when_the_other_has_ended() -> None:
            told.append(await events.get())
            manager.workers = [worker]

        told: list[str] = []
        waiting = asyncio.create_task(serve_when_the_other_has_ended())
        cluster = Cluster(ClusterSpec(num_workers=2, join=manager.address), started)
        workers = await cluster.start(lambda line: None, events.put_nowait)
        await waiting
    assert [worker.worker_id for worker in workers] == ["worker-0"]
    assert told == ["worker-1 ended with exit status 1; its log above says why. The cluster continues without it"]


async def test_help_after_the_dashes_is_the_worker_s() -> None:
    printed = await asyncio.to_thread(run_here, ".venv/bin/kvpool up -- --help", os.environ)
    assert printed is not None
    assert "usage: kvpool worker " in printed
    assert "--max-mixed-prefill-tokens" in printed
