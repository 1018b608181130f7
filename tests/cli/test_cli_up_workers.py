"""How `kvpool up` ends when its workers cannot use their settings, and what it does when one of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from kvpool.cli.commands.up import run_cluster
from kvpool.cli.launch.children import Children
from kvpool.cli.launch.cluster import Cluster, ClusterSpec, free_port
from kvpool.cli.launch.log import Level
from kvpool.cli.launch.trial import try_settings
from kvpool.process.services import WORKER_MODULE, service_command
from tests.cli.test_cli_children import child
from tests.cli.test_cli_up_plan import spec
from tests.client.commands import became, exit_status, run_kvpool
from tests.client.fakes import FakeWorker, fake_cluster
from tests.client.processes import is_alive
from tests.cluster.forked_children import forked_children


class Errors:
    """A log of `kvpool up` that keeps its own errors."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, name: str, line: str) -> None:
        """A line of a process."""

    def say(self, line: str, level: Level = Level.info, fields: Mapping[str, object] | None = None) -> None:
        if level is Level.error:
            self.lines.append(line)


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
        (
            ["--model", "MODEL", "--max-model-len", "513"],  # config.json is enough; the weights need not be there
            1,
            ["kvpool worker: --max-model-len 513 is not within 2 … 512, the limits of the model's config."],
        ),
    ],
)
async def test_what_a_worker_cannot_use_ends_it_before_a_worker_is_started(
    arguments: list[str], status: int, says: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
    given = [word.replace("MODEL", str(tmp_path)) for word in arguments]
    errors = Errors()
    started = spec("--port", str(free_port()), "--state-dir", str(tmp_path / "state"), *given)
    with forked_children():
        assert await run_cluster(started, errors, Console(quiet=True)) == status
    assert not (tmp_path / "state" / "workers").exists(), "each worker makes its folder there"
    assert len(errors.lines) == len(says)
    assert all(line.startswith(start) for line, start in zip(errors.lines, says, strict=True)), errors.lines


async def test_without_a_manager_of_its_own_it_refuses_the_same() -> None:
    done = await run_kvpool("up", "--join", f"127.0.0.1:{free_port()}", "--model", "/no/such")
    assert done.stderr.startswith("kvpool worker: There is no model folder '/no/such'")
    assert done.returncode == 1


async def test_a_dry_run_without_an_answer_is_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    await try_settings(child("worker-0", script), longest_seconds=0.2)
    assert not pid_file.exists() or not is_alive(int(pid_file.read_text()))


async def test_a_worker_that_ends_while_the_others_start_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fails, lives = "sys.exit('--dry-run' not in sys.argv)", "time.sleep(0 if '--dry-run' in sys.argv else 600)"
    children = [
        child(name, f"import sys, time; print('fine', flush=True); {rest}")
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


def test_help_after_the_dashes_is_the_worker_s() -> None:
    assert became(lambda: exit_status(["up", "--", "--help"])) == service_command(WORKER_MODULE, ["--help"])
