"""`kvpool up` with the real services: it gets ready, it answers, and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvpool.client.cli.launch.cluster import free_port, require_free_port
from kvpool.client.errors import Unavailable
from tests.client.processes import descendants, is_alive
from tests.scrape import scrape

KVPOOL = [sys.executable, "-m", "kvpool.client.cli"]


class Up:
    """A running `kvpool up` and what it has printed so far."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.lines: list[str] = []
        self.manager = f"127.0.0.1:{port}"

    async def read_until(self, word: str) -> str:
        """The next line with `word` in it; an assertion with the whole log if it never comes."""
        assert self.process.stdout is not None
        async with asyncio.timeout(90):
            while line := (await self.process.stdout.readline()).decode():
                self.lines.append(line)
                if word in line:
                    return line
        raise AssertionError(f"no {word!r} in:\n{''.join(self.lines)}")

    async def wait(self) -> int:
        """Exit status; the rest of the output is in `lines`."""
        assert self.process.stdout is not None
        rest = await asyncio.wait_for(self.process.stdout.read(), 60)
        self.lines.append(rest.decode())
        return await self.process.wait()

    async def run(self, *arguments: str) -> str:
        """stdout of a further kvpool command, which must succeed."""
        process = await asyncio.create_subprocess_exec(
            *KVPOOL, *arguments, "--manager", self.manager,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, err.decode()
        return out.decode()


def free_ports(count: int) -> int:
    """The first of so many ports beside each other that nobody listens on at this moment."""
    while True:
        first = free_port()
        try:
            for port in range(first, min(first + count, 65536)):
                require_free_port("127.0.0.1", port)
        except Unavailable:
            continue
        if first + count <= 65536:
            return first


def _environment() -> dict[str, str]:
    """State that no flag names goes where the tests' own files are."""
    return {**os.environ, "XDG_STATE_HOME": str(Path(tempfile.gettempdir()) / f"kvpool-tests-{os.getuid()}")}


@asynccontextmanager
async def up(state_dir: Path | None, *arguments: str) -> AsyncIterator[Up]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *KVPOOL, "up", "--port", str(port), "--device", "cpu",
        *(() if state_dir is None else ("--state-dir", str(state_dir))), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=_environment(),
    )  # fmt: skip
    try:
        yield Up(process, port)
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.communicate(), 60)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    from tests.tiny_models import make_tiny_model

    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny"), tokenizer=True).path


def registered(lines: list[str]) -> set[str]:
    """The workers whose log, in JSON, says so."""
    logs = [line.partition("| ") for line in lines]
    entries = [(name.rstrip(), json.loads(entry)) for name, _, entry in logs if entry.startswith("{")]
    return {name for name, entry in entries if entry["event"] == "registered"}


@pytest.mark.slow
async def test_a_cluster_starts_answers_and_stops(tiny_model: Path, tmp_path: Path) -> None:
    """Two workers; every command works against them, and each tells its metrics; what stands behind `--` reaches both; SIGTERM is
    a success and ends every process."""
    metrics_port = free_ports(3)
    small = ["--workers", "2", "--model", str(tiny_model), "--num-blocks", "64", "--block-size", "4"]
    async with up(tmp_path, *small, "--metrics-port", str(metrics_port), "--", "--log-format", "json") as cluster:
        names = ["manager", "worker-0", "worker-1"]
        urls = [f"http://127.0.0.1:{metrics_port + index}/metrics" for index in range(3)]
        for name, url in zip(names, urls, strict=True):
            assert url in await cluster.read_until(f"metrics of {name}")
        assert "kvpool chat" in await cluster.read_until("ready: in")
        # Each says so in JSON, one of them perhaps a moment after the manager has.
        while registered(cluster.lines) != set(names[1:]):
            await cluster.read_until("registered")
        pids = descendants(cluster.process.pid)
        assert len(pids) == 3
        text = await cluster.run("generate", "Hello world", "--max-tokens", "8")
        cold = json.loads(await cluster.run("generate", "Hello there", "--max-tokens", "8", "--json"))
        warm = json.loads(await cluster.run("generate", "Hello there", "--max-tokens", "8", "--json"))
        assert len(text) > 1
        assert (cold["num_prompt_tokens"], warm["num_cached_tokens"]) == (11, 8)
        assert (cold["token_ids"], cold["text"]) == (warm["token_ids"], warm["text"])
        assert warm["worker_id"] == cold["worker_id"]
        assert (await cluster.run("chat", "Hi", "--max-tokens", "4")).strip()
        workers = json.loads(await cluster.run("status", "--json"))["workers"]
        assert [worker["worker_id"] for worker in workers] == ["worker-0", "worker-1"]
        assert all(worker["free"] + worker["cached"] + worker["held"] + worker["reserved"] == 63 for worker in workers)
        assert sum(worker["cached"] for worker in workers) > 0
        assert "▒" in await cluster.run("blocks")
        assert "every law holds" in await cluster.run("check")
        assert "worker-1  serving" in await cluster.run("top", "--once", "--interval", "0.1")
        manager, *pages = [await scrape(url) for url in urls]
        assert manager.labelled("kvpool_manager_capacity_blocks", "worker") == {"worker-0": 63, "worker-1": 63}
        hits = [page.value("kvpool_worker_cached_tokens_total") for page in pages]
        assert sum(hits) == sum(manager.labelled("kvpool_manager_cached_tokens_total", "worker").values()) >= 8
        cluster.process.send_signal(signal.SIGTERM)
        assert await cluster.wait() == 0
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.slow
async def test_what_dies_is_started_again_and_serves(tiny_model: Path, tmp_path: Path) -> None:
    """kill -9 of a worker, then of the manager: each death is told with what ended it, and the cluster answers again."""
    async with up(tmp_path, "--model", str(tiny_model), "--num-blocks", "64") as cluster:
        await cluster.read_until("ready: in")
        manager, worker = descendants(cluster.process.pid)
        os.kill(worker, signal.SIGKILL)
        await cluster.read_until("worker-0 was ended by SIGKILL; starting it again")
        await cluster.read_until("registered")
        assert (await cluster.run("generate", "Hello", "--max-tokens", "4")).strip()
        os.kill(manager, signal.SIGKILL)
        await cluster.read_until("manager was ended by SIGKILL; starting it again")
        await cluster.read_until("epoch=2")
        assert (await cluster.run("generate", "Hello", "--max-tokens", "4")).strip()
        assert "every law holds" in await cluster.run("check")
        cluster.process.send_signal(signal.SIGTERM)
        assert await cluster.wait() == 0


@pytest.mark.slow
async def test_a_worker_that_is_refused_does_not_end_the_others(tiny_model: Path, tmp_path: Path) -> None:
    """Another process holds its state folder, as a second worker of that name would. The manager and the other worker go on,
    and when the folder is free the worker is back."""
    async with up(tmp_path, "--workers", "2", "--model", str(tiny_model), "--num-blocks", "64") as cluster:
        await cluster.read_until("ready: in")
        lock = tmp_path / "workers" / "worker-1" / "lock"
        pid = int(lock.read_text())
        # The one that runs keeps the lock that it has; the next one finds this.
        lock.unlink()
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.kill(pid, signal.SIGKILL)
            await cluster.read_until("another process runs this worker already")
            await cluster.read_until("worker-1 ended with exit status 1; starting it again")
            answer = json.loads(await cluster.run("generate", "Hello", "--max-tokens", "4", "--json"))
            assert answer["worker_id"] == "worker-0"
        finally:
            os.close(descriptor)
        await cluster.read_until("registered")
        cluster.process.send_signal(signal.SIGTERM)
        assert await cluster.wait() == 0


@pytest.mark.slow
async def test_a_worker_that_cannot_start_is_left_out(tiny_model: Path, tmp_path: Path) -> None:
    """The cluster is ready with the other one, and says so."""
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "worker-1").write_text("no folder")
    async with up(tmp_path, "--workers", "2", "--model", str(tiny_model), "--num-blocks", "64") as cluster:
        await cluster.read_until(
            "worker-1 ended with exit status 1; its log above says why. The cluster goes on without it"
        )
        await cluster.read_until("worker-0 serves")
        await cluster.read_until("ready: in")
        assert "state folder" in "".join(cluster.lines)
        assert (await cluster.run("generate", "Hello", "--max-tokens", "4")).strip()
        cluster.process.send_signal(signal.SIGTERM)
        assert await cluster.wait() == 0


@pytest.mark.slow
async def test_the_cluster_ends_when_its_last_worker_has_left(tiny_model: Path, tmp_path: Path) -> None:
    """A drained worker is not started again."""
    async with up(tmp_path, "--workers", "2", "--model", str(tiny_model), "--num-blocks", "64") as cluster:
        await cluster.read_until("ready: in")
        assert await cluster.run("drain", "worker-0") == "worker-0 has left\n"
        await cluster.read_until("worker-0 has left")
        assert (
            json.loads(await cluster.run("generate", "Hello", "--max-tokens", "4", "--json"))["worker_id"] == "worker-1"
        )
        # The manager ends with it, so that nobody may be left to say that it has left.
        assert await cluster.run("drain", "--no-wait", "worker-1") == "worker-1 is leaving\n"
        await cluster.read_until("every worker has left")
        assert await cluster.wait() == 0


@pytest.mark.slow
async def test_workers_join_the_manager_of_another_up_and_settings_come_from_files(
    tiny_model: Path, tmp_path: Path
) -> None:
    """As on a second machine: no manager of its own, other names; both read one settings file."""
    config = tmp_path / "kvpool.toml"
    config.write_text(f'[worker]\nmodel = "{tiny_model}"\nnum_blocks = 33\nblock_size = 4\n[up]\nworkers = 1\n')
    async with up(tmp_path, "--config", str(config)) as first:
        await first.read_until("ready: in")
        async with up(None, "--config", str(config), "--join", first.manager, "--name", "far") as second:
            assert "32 blocks of 4 tokens" in await second.read_until("far-0 serves")
            await second.read_until("ready: in")
            assert len(descendants(second.process.pid)) == 1
            workers = json.loads(await first.run("status", "--json"))["workers"]
            assert [worker["worker_id"] for worker in workers] == ["far-0", "worker-0"]
            second.process.send_signal(signal.SIGTERM)
            assert await second.wait() == 0
        workers = json.loads(await first.run("status", "--json"))["workers"]
        assert [worker["worker_id"] for worker in workers] == ["worker-0"]


@pytest.mark.slow
async def test_a_worker_that_cannot_start_ends_the_cluster(tmp_path: Path) -> None:
    """Its own words stand in the log, before ours."""
    async with up(tmp_path, "--model", str(tmp_path / "no-such-model")) as cluster:
        assert await cluster.wait() == 1
    log = "".join(cluster.lines)
    assert 0 < log.index("no-such-model") < log.index("worker-0 ended with exit status")
    assert "Traceback" not in log
