"""Where `kvpool up` puts the metrics of its processes, and what it refuses."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from kvpool.cache_service.settings import ManagerSettings
from kvpool.cli.launch.children import ChildSpec
from kvpool.client.errors import Unavailable
from kvpool.process.settings import SettingsProblem, load_settings
from kvpool.worker_service.settings import WorkerSettings
from tests.cli.test_cli_up_workers import spec


def ports(children: Sequence[ChildSpec]) -> dict[str, int | None]:
    """The metrics port of each, as the service itself understands its arguments."""
    found = {}
    for child in children:
        arguments = list(child.command[child.command.index("-m") + 2 :])
        if child.name == "manager":
            found[child.name] = load_settings(ManagerSettings, arguments).metrics_port
        else:
            found[child.name] = load_settings(WorkerSettings, arguments).metrics_port
    return found


def test_no_process_tells_metrics_unless_asked() -> None:
    assert ports(spec("--workers", "2").children()) == {"manager": None, "worker-0": None, "worker-1": None}
    assert spec().metrics_urls == {}


def test_each_process_has_a_port_of_its_own_and_the_urls_are_those() -> None:
    started = spec("--workers", "2", "--metrics-port", "9500")
    assert ports(started.children()) == {"manager": 9500, "worker-0": 9501, "worker-1": 9502}
    assert started.metrics_urls["worker-1"] == "http://127.0.0.1:9502/metrics"


def test_without_a_manager_the_workers_begin_with_the_port_that_was_given() -> None:
    started = spec("--join", "10.0.0.1:50051", "--name", "b", "--metrics-port", "9500", "--metrics-host", "10.0.0.2")
    assert ports(started.children()) == {"b-0": 9500}
    assert started.metrics_urls == {"b-0": "http://10.0.0.2:9500/metrics"}


def test_the_host_of_the_service_is_not_that_of_its_metrics() -> None:
    started = spec("--host", "10.0.0.1", "--metrics-port", "9500")
    assert started.metrics_urls["manager"] == "http://127.0.0.1:9500/metrics"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workers", "3", "--metrics-port", "65533"), "4 processes need as many ports"),
        (("--port", "9502", "--workers", "2", "--metrics-port", "9500"), "among them the manager's own, 9502"),
    ],
)
def test_ports_that_cannot_be_are_refused(arguments: Sequence[str], said: str) -> None:
    with pytest.raises(SettingsProblem, match=said):
        spec(*arguments)


def test_a_metrics_port_that_is_taken_is_told_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started = spec("--join", "10.0.0.1:50051", "--metrics-port", str(port))
        with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:{port}.*choose another port with --metrics-port"):
            started.require_free_ports()
