"""`kvpool health` and the images' `kvpool-health`: exit status 0 if a service serves, else 1 and a line that says why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvpool.cli.launch.cluster import free_port
from kvpool.process.address import DEFAULT_MANAGER
from tests.cli.conftest import Ran, Run
from tests.python_program import run_python

STATUS = health_pb2.HealthCheckResponse
SERVICE = "kvpool.v1.CacheService"


class Silent(health_pb2_grpc.HealthServicer):
    """Takes the question and never answers."""

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        await asyncio.Event().wait()
        raise AssertionError


@asynccontextmanager
async def service(servicer: health_pb2_grpc.HealthServicer | None = None, **states: int) -> AsyncIterator[str]:
    """The address of a server with these states by service, or another servicer of its health."""
    server = grpc.aio.server()
    if states:
        servicer = health.aio.HealthServicer()
        for name, state in states.items():
            await servicer.set({"process": "", "manager": SERVICE, "worker": "kvpool.v1.WorkerService"}[name], state)
    if servicer is not None:
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture(params=["kvpool health", "kvpool-health"])
def command(request: pytest.FixtureRequest) -> str:
    """As users and as containers call it."""
    return str(request.param)


async def ask(run: Run, command: str, *arguments: str, **environment: str) -> Ran:
    """Of the user's command in this process, of the containers' one as a process."""
    if command == "kvpool health":
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return await run("health", *arguments)
    done = await asyncio.to_thread(run_python, "client/health.py", *arguments, PYTHONPATH="", **environment)
    return Ran(done.returncode, done.stdout, done.stderr)


async def test_a_service_that_serves_is_status_0(run: Run, command: str) -> None:
    async with service(process=STATUS.SERVING, manager=STATUS.SERVING) as address:
        assert await ask(run, command, address) == (0, f"{address} serves\n", "")
        assert await ask(run, command, address, "--service", SERVICE) == (0, f"{address} serves {SERVICE}\n", "")
        assert await ask(run, command, KVPOOL_MANAGER=address) == (0, f"{address} serves\n", "")


async def test_one_that_does_not_serve_is_status_1(run: Run, command: str) -> None:
    """A worker without a session, a manager that stops: they answer, and say no."""
    async with service(process=STATUS.NOT_SERVING, manager=STATUS.SERVING) as address:
        assert_failure(await ask(run, command, address), address, "NOT_SERVING", "log")
        assert (await ask(run, command, address, "--service", SERVICE)).status == 0
        assert_failure(await ask(run, command, address, "--service", "no.such"), address, "no.such", "--service")


async def test_one_that_never_answers_is_status_1(run: Run, command: str) -> None:
    """A frozen process still accepts connections."""
    async with service(Silent()) as address:
        assert_failure(await ask(run, command, address, "--timeout", "0.3"), address, "0.3 s", "--timeout")


async def test_nobody_or_somebody_else_is_status_1(run: Run, command: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert_failure(await ask(run, command, address), address, "is it running", "refused")
    async with service() as address:
        assert_failure(await ask(run, command, address), address, "another program")


async def test_without_an_address_the_manager_is_asked(run: Run, command: str) -> None:
    """The images' health.py imports nothing of kvpool, so it has a copy of that address."""
    assert f"default: {DEFAULT_MANAGER}" in (await ask(run, command, "--help")).out


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost:", ""])
async def test_an_address_without_a_port_is_refused(address: str, run: Run, command: str) -> None:
    """gRPC would take port 443, and the line would be about a port that nobody named."""
    assert_failure(await ask(run, command, address), repr(address), "HOST:PORT")


def assert_failure(ran: Ran, *words: str) -> None:
    """Status 1, nothing on stdout, and one line on stderr with these words."""
    assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1), ran
    assert all(word in ran.err for word in words), ran.err
