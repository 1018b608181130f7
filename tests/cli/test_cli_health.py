"""`kvpool health` and the images' `kvpool-health`: exit status 0 if a service serves, else 1 and a line that says why."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvpool.cli.launch.cluster import free_port
from kvpool.process.address import DEFAULT_MANAGER
from tests.client.commands import kvpool

STATUS = health_pb2.HealthCheckResponse
SERVICE = "kvpool.v1.CacheService"
REPOSITORY = Path(__file__).parents[2]
COMMANDS = ("kvpool health", "kvpool-health")
"""As users and as containers call it."""


class Silent(health_pb2_grpc.HealthServicer):
    """Takes the question and never answers."""

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        await asyncio.Event().wait()
        raise AssertionError


class Service:
    """A server whose health a test sets."""

    def __init__(self) -> None:
        self.server = grpc.aio.server()
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.health = health.aio.HealthServicer()


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    yield service
    await service.server.stop(None)


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def run(command: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr: of the user's command in this process, of the containers' one as a process."""
    if command == "kvpool health":
        output, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(output), redirect_stderr(errors), pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return await kvpool("health", *arguments), output.getvalue(), errors.getvalue()
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(REPOSITORY / "client" / "health.py"), *arguments],
        cwd=REPOSITORY,
        env={"PATH": "", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


async def test_a_service_that_serves_is_status_0(service: Service, command: str) -> None:
    """As a whole, by name, and where the environment says."""
    health_pb2_grpc.add_HealthServicer_to_server(service.health, service.server)
    await service.health.set(SERVICE, STATUS.SERVING)
    await service.server.start()
    assert await run(command, service.address) == (0, f"{service.address} serves\n", "")
    assert await run(command, service.address, "--service", SERVICE) == (0, f"{service.address} serves {SERVICE}\n", "")
    assert await run(command, KVPOOL_MANAGER=service.address) == (0, f"{service.address} serves\n", "")


async def test_one_that_does_not_serve_is_status_1(service: Service, command: str) -> None:
    """A worker without a session, a manager that stops: they answer, and say no."""
    health_pb2_grpc.add_HealthServicer_to_server(service.health, service.server)
    await service.health.set("", STATUS.NOT_SERVING)
    await service.health.set(SERVICE, STATUS.SERVING)
    await service.server.start()
    assert_failure(await run(command, service.address), service.address, "NOT_SERVING", "log")
    assert (await run(command, service.address, "--service", SERVICE))[0] == 0
    assert_failure(await run(command, service.address, "--service", "no.such"), service.address, "no.such", "--service")


async def test_one_that_never_answers_is_status_1(service: Service, command: str) -> None:
    """A frozen process still accepts connections."""
    health_pb2_grpc.add_HealthServicer_to_server(Silent(), service.server)
    await service.server.start()
    assert_failure(await run(command, service.address, "--timeout", "0.3"), service.address, "0.3 s", "--timeout")


async def test_nobody_or_somebody_else_is_status_1(service: Service, command: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert_failure(await run(command, address), address, "is it running", "refused")
    await service.server.start()
    assert_failure(await run(command, service.address), service.address, "another program")


async def test_without_an_address_the_manager_is_asked(command: str) -> None:
    """The images' health.py imports nothing of kvpool, so it has a copy of that address."""
    _, out, _ = await run(command, "--help")
    assert f"default: {DEFAULT_MANAGER}" in out


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost:", ""])
async def test_an_address_without_a_port_is_refused(address: str, command: str) -> None:
    """gRPC would take port 443, and the line would be about a port that nobody named."""
    assert_failure(await run(command, address), repr(address), "HOST:PORT")


def assert_failure(found: tuple[int, str, str], *words: str) -> None:
    """Status 1, nothing on stdout, and one line on stderr with these words."""
    status, out, err = found
    assert (status, out, err.count("\n")) == (1, "", 1), err
    assert all(word in err for word in words), err
