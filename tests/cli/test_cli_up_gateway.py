"""`kvpool up --http`: a gateway with the cluster. tests/cli/test_cli_up.py has one that answers and is killed."""

from __future__ import annotations

import importlib.util
import socket

import pytest

from kvpool.cli import settings
from kvpool.client.errors import Unavailable
from kvpool.gateway.settings import GatewaySettings
from kvpool.process.settings import SettingsProblem, load_settings
from tests.cli.test_cli_up import free_ports
from tests.cli.test_cli_up_workers import spec


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
    monkeypatch.setattr(settings, "find_spec", lambda name: None if name == "starlette" else real(name))
    with pytest.raises(SettingsProblem, match=r"starlette is not installed.*kvpool\[gateway\]"):
        spec("--http", "8099")
