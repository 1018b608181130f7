"""`kvpool up` with the real services: it gets ready, answers, restarts what dies, and leaves nothing running.

The cluster's own `kvpool up` runs in this process, with a manager and workers that are forked; the one that joins is the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Self

import httpx
import pytest

from kvpool.cli.launch.cluster import free_port
from tests.cli.test_cli_up_plan import free_ports
from tests.client.commands import KVPOOL, kvpool
from tests.client.processes import descendants, is_alive
from tests.client.up_here import UpHere
from tests.cluster.process import Process
from tests.scrape import scrape
from tests.until import until


class Up(UpHere):
    """A running cluster, which is stopped at the end, and its output."""

    def __init__(self, *arguments: str) -> None:
        port = free_port()
        super().__init__(["--port", str(port), "--device", "cpu", *arguments])
        self.manager = f"127.0.0.1:{port}"
        self._num_read = 0

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.end)

    async def read_until(self, word: str) -> str:
        """The next line that contains `word`."""
        async with asyncio.timeout(90):
            while True:
                line, newline, _ = (output := self.output)[self._num_read :].partition("\n")
                if not newline:
                    assert self.status is None, f"no {word!r} in:\n{output}"
                    await asyncio.sleep(0.02)
                    continue
                self._num_read += len(line) + 1
                if word in line:
                    return line

    async def run(self, *arguments: str) -> str:
        """stdout of another kvpool command, which must succeed; in this process, which has imported it already."""
        with contextlib.redirect_stdout(io.StringIO()) as output:
            status = await kvpool(*arguments, "--manager", self.manager)
        assert status == 0, output.getvalue()
        return output.getvalue()


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    from tests.tiny_models import make_tiny_model

    return make_tiny_model("llama", tmp_path_factory.mktemp("tiny"), tokenizer=True).path


async def until_registered(cluster: Up, *workers: str) -> None:
    """Read on until the workers' own logs, in JSON, say that they are registered, in any order."""
    waited_for = set(workers)
    while waited_for:
        waited_for.discard(json.loads(await cluster.read_until('"event": "registered"'))["worker_id"])


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_life_of_a_cluster_whose_log_is_json(tiny_model: Path, tmp_path: Path) -> None:
    http_port = free_ports(4)
    metrics_port = http_port + 1
    ports = ["--http", str(http_port), "--metrics-port", str(metrics_port)]
    small = ["--workers", "2", "--model", str(tiny_model), "--num-blocks", "64", "--block-size", "4"]
    async with (
        Up("--state-dir", str(tmp_path / "state"), *small, *ports, "--log-format", "json") as cluster,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=60) as http,
    ):
        names = ["manager", "worker-0", "worker-1"]
        urls = [f"http://127.0.0.1:{metrics_port + index}/metrics" for index in range(3)]
        said = {}
        for name in names:
            said[name] = json.loads(await cluster.read_until(f"{name} (pid "))["pid"]
        for name, url in zip(names, urls, strict=True):
            assert url in await cluster.read_until(f"metrics of {name}")
        line = await cluster.read_until("gateway (pid ")
        assert f"http://127.0.0.1:{http_port}/v1" in line
        said["gateway"] = json.loads(line)["pid"]
        await cluster.read_until("ready: in")
        pids = list(said.values())
        assert all(is_alive(pid) for pid in pids)
        await every_command_works(cluster, urls)
        config = tmp_path / "kvpool.toml"
        config.write_text(
            f'[worker]\nmodel = "{tiny_model}"\nnum_blocks = 64\nblock_size = 4\n[up]\nname = "far"\njoin = "{cluster.manager}"\n'
        )
        await workers_of_another_up_join(cluster, config)
        pids.append(await the_gateway_is_started_again(cluster, http, said["gateway"]))

        for name in ("worker-1", "manager"):
            os.kill(said[name], signal.SIGKILL)
            await cluster.read_until(f"{name} was ended by SIGKILL; starting it again")
        await until_registered(cluster, "worker-0", "worker-1")
        status = json.loads(await cluster.run("status", "--json"))
        assert status["epoch"] == 2
        assert [worker["worker_id"] for worker in status["workers"]] == ["worker-0", "worker-1"]
        assert "every law holds" in await cluster.run("check")

        assert await cluster.run("drain", "worker-0") == "worker-0 has left\n"
        await cluster.read_until("worker-0 has left")
        answer = json.loads(await cluster.run("generate", "Hello", "--max-tokens", "4", "--json"))
        assert answer["worker_id"] == "worker-1"
        # Manager and gateway end with the last worker.
        assert await cluster.run("drain", "worker-1") == "worker-1 has left\n"
        await cluster.read_until("every worker has left")
        assert await asyncio.to_thread(cluster.wait) == 0
        assert not await listens(http)
    assert not [pid for pid in pids if is_alive(pid)]
    entries = [json.loads(line) for line in cluster.output.splitlines()]
    assert {(entry["service"], entry.get("worker_id")) for entry in entries if entry["service"] != "manager"} >= {
        ("up", None),
        ("worker", "worker-0"),
        ("worker", "worker-1"),
    }
    assert all(entry["event"] and entry["level"] for entry in entries)


async def workers_of_another_up_join(cluster: Up, config: Path) -> None:
    """As on a second machine: no manager of its own, other names. Ctrl-C ends it with status 130, and leaves nothing running."""
    command = [*KVPOOL[1:], "up", "--device", "cpu", "--config", str(config)]
    second = Process("up", command, config.with_name("up.log"), {"XDG_STATE_HOME": str(config.parent)})
    try:
        await until(lambda: "ready: in" in second.log or second.status is not None, pause=0.02, seconds=90)
        assert re.search(r"far-0 \(pid .*63 blocks of 4 tokens", second.log)
        (pid,) = descendants(second.pid)
        workers = json.loads(await cluster.run("status", "--json"))["workers"]
        assert [worker["worker_id"] for worker in workers] == ["far-0", "worker-0", "worker-1"]
        second.send(signal.SIGINT)
        assert await second.ended(60) == 130
    finally:
        second.kill()
    assert not is_alive(pid)
    workers = json.loads(await cluster.run("status", "--json"))["workers"]
    assert [worker["worker_id"] for worker in workers] == ["worker-0", "worker-1"]


async def the_gateway_is_started_again(cluster: Up, http: httpx.AsyncClient, pid: int) -> int:
    """Also after status 0, which for a worker means that it has left. Returns the id of the last process."""
    for number, ended in ((signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGTERM, "ended with exit status 0")):
        answer = await http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4})
        assert answer.json()["usage"]["completion_tokens"] > 0, answer.text
        os.kill(pid, number)
        await cluster.read_until(f"gateway {ended}; starting it again")
        line = await cluster.read_until("gateway was started again (pid ")
        pid = int(line.partition("(pid ")[2].partition(")")[0])
        async with asyncio.timeout(60):
            while not await listens(http):
                await asyncio.sleep(0.05)
    return pid


async def listens(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/version")).status_code == 200
    except httpx.TransportError:
        return False


async def every_command_works(cluster: Up, urls: list[str]) -> None:
    """Against a fresh cluster of two workers with 63 blocks of 4 tokens each."""
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
