"""`kvpool up --http`: a gateway with the cluster."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
from pathlib import Path

import httpx
import pytest

from kvpool.client.cli.launch import services
from kvpool.client.errors import Unavailable
from kvpool.gateway.settings import GatewaySettings
from kvpool.process.settings import SettingsProblem, load_settings
from tests.client.test_cli_up import free_ports, up
from tests.client.test_cli_up_workers import spec
from tests.tiny_models import make_tiny_model


def test_the_gateway_comes_last_and_knows_its_manager() -> None:
    """As the gateway itself understands its arguments."""
    started = spec("--port", "50099", "--http", "8099", "--log-format", "json")
    *_, gateway = started.children()
    assert gateway.name == "gateway"
    settings = load_settings(GatewaySettings, list(gateway.command[gateway.command.index("-m") + 2 :]))
    assert (settings.host, settings.port, settings.manager) == ("127.0.0.1", 8099, "127.0.0.1:50099")
    assert settings.log_format == "json"
    assert started.http_url == "http://127.0.0.1:8099"


def test_without_the_flag_there_is_none() -> None:
    started = spec("--workers", "2")
    assert [child.name for child in started.children()] == ["manager", "worker-0", "worker-1"]
    assert started.http_url == ""


def test_it_joins_the_manager_of_another_machine() -> None:
    *_, gateway = spec("--join", "10.0.0.1:50051", "--name", "b", "--http", "8099").children()
    settings = load_settings(GatewaySettings, list(gateway.command[gateway.command.index("-m") + 2 :]))
    assert settings.manager == "10.0.0.1:50051"


def test_a_port_that_is_taken_is_named_with_its_flag() -> None:
    """Before anything is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"{port}.*--http"):
            spec("--port", str(free_ports(1)), "--http", str(port)).require_free_ports()


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started, too."""
    real = importlib.util.find_spec
    monkeypatch.setattr(services, "find_spec", lambda name: None if name == "starlette" else real(name))
    with pytest.raises(SettingsProblem, match=r"starlette is not installed.*kvpool\[gateway\]"):
        spec("--http", "8099")


@pytest.mark.slow
async def test_the_gateway_answers_and_is_started_again_when_it_ends(tmp_path: Path) -> None:
    """Also after status 0, which for a worker means that it has left. A cluster whose workers have left ends."""
    port = free_ports(1)
    model = make_tiny_model("llama", tmp_path / "model", tokenizer=True)
    flags = ["--model", str(model.path), "--num-blocks", "64", "--http", str(port)]
    async with up(tmp_path, "--workers", "1", *flags) as cluster, httpx.AsyncClient(timeout=60) as client:
        line = await cluster.read_until("gateway (pid ")
        assert f"http://127.0.0.1:{port}/v1" in line
        await cluster.read_until("ready: in")
        pid = int(line.partition("gateway (pid ")[2].partition(")")[0])
        for number, ended in ((signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGTERM, "ended with exit status 0")):
            body = {"prompt": "Hello", "max_tokens": 4}
            answer = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] > 0, answer.text
            os.kill(pid, number)
            await cluster.read_until(f"gateway {ended}; starting it again")
            line = await cluster.read_until("gateway was started again (pid ")
            pid = int(line.partition("(pid ")[2].partition(")")[0])
            async with asyncio.timeout(60):
                while not await listens(client, port):
                    await asyncio.sleep(0.05)
        await cluster.run("drain", "worker-0")
        assert await cluster.wait() == 0
        assert not await listens(client, port)


async def listens(client: httpx.AsyncClient, port: int) -> bool:
    """Whether the gateway answers."""
    try:
        return (await client.get(f"http://127.0.0.1:{port}/version")).status_code == 200
    except httpx.TransportError:
        return False
