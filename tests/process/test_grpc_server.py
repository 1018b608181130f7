"""A gRPC server that ends unasked is replaced: on its port, with its servicers, its health and its calls in flight."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, nullcontext
from typing import Any

import grpc
import httpx
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ValidationError

from kvpool.process import grpc_server, server_settings, serving_loop
from kvpool.process.address import PortError
from kvpool.process.grpc_server import GrpcServer, Services
from kvpool.process.metrics import MetricsServer, listen_for_metrics
from kvpool.process.server_settings import ServerSettings, descriptors_for_connections
from tests import http2
from tests.until import until

HOST = "127.0.0.1"
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
BAD_PATH = b"/\xff"
"""What ends grpcio's server."""


class Counting:
    """Streams as many numbers as the request says, each after the test has let it go on."""

    def __init__(self) -> None:
        self.go_on = asyncio.Semaphore(0)

    def add_to(self, server: Any) -> None:
        """As generated code does."""
        handlers: dict[str, Any] = {
            "Count": grpc.unary_stream_rpc_method_handler(self._count),
            "Hang": grpc.unary_stream_rpc_method_handler(self._hang),
            "Echo": grpc.unary_unary_rpc_method_handler(self._echo),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
        server.add_registered_method_handlers("test", handlers)

    async def _count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            await self.go_on.acquire()
            yield b"%d" % number

    async def _hang(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"begun"
        await asyncio.Event().wait()

    async def _echo(self, request: bytes, context: Any) -> bytes:
        return request


class Settings(ServerSettings):
    table = "test"


class Served:
    """A server under test, its servicer and a channel."""

    def __init__(self, settings: ServerSettings) -> None:
        self.counting = Counting()
        self.server = GrpcServer(HOST, 0, settings)

    async def __aenter__(self) -> Served:
        await self.server.start(Services(names=("test",), add_to=self.counting.add_to, limits={}))
        self.port = self.server.port
        self.channel: Any = self.new_channel()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(0)

    async def begin_counting(self, count: int) -> Any:
        """A call that streams `count` numbers, of which the first has been read."""
        call = self.channel.unary_stream("/test/Count")(b"%d" % count)
        self.counting.go_on.release()
        assert await call.read() == b"0"
        return call

    def new_channel(self) -> Any:
        """A connection of its own. Its type knows no methods of raw bytes."""
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 50))
        return grpc.aio.insecure_channel(f"{HOST}:{self.port}", options=options)

    async def echo(self) -> bytes:
        """A call on a connection of its own, waiting for one to be there."""
        async with self.new_channel() as channel:
            found: bytes = await channel.unary_unary("/test/Echo")(b"here", wait_for_ready=True, timeout=20)
            return found

    async def attack(self) -> http2.Connection:
        """Send what ends the server, and wait until it has been replaced."""
        before = self.server.num_rebuilds
        connection = await http2.Connection.open(self.port)
        await connection.request(BAD_PATH)
        await until(lambda: self.server.num_rebuilds > before)
        return connection


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with Served(Settings()) as served:
        yield served


@pytest.fixture
async def mortal(loop_of_grpcio: None) -> AsyncIterator[Served]:
    async with Served(Settings()) as served:
        yield served


# -- the serving loop


async def test_a_bad_path_costs_nothing(served: Served) -> None:
    """Not even those who share its connection: each is refused, as a method that is not there, and a call in flight goes on."""
    call = await served.begin_counting(2)
    async with await http2.Connection.open(served.port) as connection:
        async with asyncio.timeout(20):
            for refused in await connection.answered({await connection.request(BAD_PATH) for _ in range(20)}):
                assert refused.flags & http2.Flag.END_STREAM
            good = await connection.request(b"/test/Echo", b"here")
            while (frame := await connection.read()) is not None and frame.kind != http2.Kind.DATA:
                pass
            assert frame is not None
            assert (frame.stream, frame.payload[5:]) == (good, b"here")
    served.counting.go_on.release()
    assert await call.read() == b"1"
    assert await call.read() is grpc.aio.EOF
    assert served.server.num_rebuilds == 0


async def test_calls_of_one_method_are_served_at_once_and_one_of_none_is_refused(served: Served) -> None:
    calls = [served.channel.unary_stream("/test/Hang")(b"") for _ in range(20)]
    async with asyncio.timeout(20):
        assert [await call.read() for call in calls] == [b"begun"] * 20
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.channel.unary_unary("/test/Missing")(b"")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    for call in calls:
        call.cancel()
    life = served.server._life
    assert life is not None
    await until(lambda: life.guard.num_calls == 0)


async def test_what_the_core_writes_to_outlives_a_loop_that_ends(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grpcio's own loop lets go of it, and the core writes to freed memory: SIGSEGV, at some later moment. The server is
    replaced all the same."""
    assert served.server._life is not None
    serving = [task for task in asyncio.all_tasks() if task.get_name().startswith("serve /test/")]
    assert len(serving) == 3

    def fail() -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(served.server._life.server._server, "_request_call", fail)  # type: ignore[attr-defined]
    async with await served.attack():
        assert await served.echo() == b"here"
    await asyncio.wait(serving, timeout=20)
    # The core has given back all that it held; no task was cancelled before.
    assert [str(task.exception()) for task in serving] == ['Failed "grpc_server_request_registered_call": None'] * 3


async def test_no_method_is_registered_with_grpcio_s_loop(mortal: Served) -> None:
    """Its loop asks the core for a call of each method that is, and frees what the core holds when it ends."""
    pending = [task for task in asyncio.all_tasks() if "_request_registered_call" in repr(task)]
    assert pending == []
    assert await mortal.echo() == b"here"


async def test_a_loop_that_is_not_known_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for known, num_lines in ((("0.0.",), 1), (serving_loop.KNOWN_GRPCIO, 0)):
        monkeypatch.setattr(serving_loop, "KNOWN_GRPCIO", known)
        with structlog.testing.capture_logs() as logged:
            async with Served(Settings()):
                pass
        assert [line["grpcio"] for line in logged] == [grpc.__version__] * num_lines


# -- servers that end


async def test_an_end_costs_neither_new_calls_nor_those_in_flight(
    mortal: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call in flight goes on to its end, on the connection that it is on, and new calls are served on the same port. The
    replaced server accepts nothing any more, and says so at once: its caller connects to the new one for its next call."""
    monkeypatch.setattr(grpc_server, "LAST_WORDS_SECONDS", 0.2)
    call = await mortal.begin_counting(5)
    async with await mortal.attack():
        assert await mortal.echo() == b"here"
        assert await mortal.channel.unary_unary("/test/Echo")(b"next", wait_for_ready=True, timeout=20) == b"next"
        # Longer than a server that is stopped leaves its calls.
        await asyncio.sleep(2 * grpc_server.LAST_WORDS_SECONDS)
        for _ in range(4):
            mortal.counting.go_on.release()
        assert [await call.read() for _ in range(4)] == [b"1", b"2", b"3", b"4"]
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
    assert mortal.server.port == mortal.port


async def test_health_outlives_the_server(mortal: Served) -> None:
    """What was NOT_SERVING is so afterwards, and those who watch it hear of the next change on the call that they have."""
    await mortal.server.health.set("test", NOT_SERVING)
    stub: Any = health_pb2_grpc.HealthStub(mortal.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="test"))
    assert (await watch.read()).status == NOT_SERVING
    async with await mortal.attack():
        async with mortal.new_channel() as channel:
            fresh: Any = health_pb2_grpc.HealthStub(channel)
            found = await fresh.Check(health_pb2.HealthCheckRequest(service="test"), wait_for_ready=True)
            assert found.status == NOT_SERVING
        await mortal.server.health.set("test", health_pb2.HealthCheckResponse.SERVING)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


async def test_stop_ends_the_newest_server_and_the_calls_of_the_replaced_ones(mortal: Served) -> None:
    call = await mortal.begin_counting(5)
    async with await mortal.attack():
        async with asyncio.timeout(20):
            await mortal.server.stop(0.1)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await call.read()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, mortal.port)


async def test_one_line_tells_of_many_ends(mortal: Served, caplog: pytest.LogCaptureFixture) -> None:
    """It is replaced as often as it ends. gRPC's own lines and asyncio's are left out: a peer may do this ten times a second."""
    with structlog.testing.capture_logs() as logged:
        for number in range(1, 5):
            async with await mortal.attack():
                assert await mortal.echo() == b"here"
            assert mortal.server.num_rebuilds == number
    assert [line["event"] for line in logged] == ["the gRPC server ended by itself and was rebuilt"]
    assert "UnicodeDecodeError" in logged[0]["why"]
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_listener_that_is_gone_is_noticed_though_grpc_says_nothing(
    mortal: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if wait_for_termination waited for ever, which it does without a time-out while a call is in flight."""
    real = grpc.aio.Server.wait_for_termination

    async def says_nothing(server: Any, timeout: float | None = None) -> bool:
        try:
            await real(server, timeout)
        except UnicodeDecodeError:
            await asyncio.sleep(timeout or 0)
        return True

    monkeypatch.setattr(grpc_server, "CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(type(mortal.server._life.server), "wait_for_termination", says_nothing)  # type: ignore[union-attr]
    async with await mortal.attack():
        assert await mortal.echo() == b"here"


def take_port(served: Served, monkeypatch: pytest.MonkeyPatch, num_tries: int) -> list[int]:
    """Another process has the port while the server is rebuilt, the first times. Returns the numbers of the tries so far."""
    monkeypatch.setattr(grpc_server, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(grpc_server, "MAX_PAUSE_SECONDS", 0.005)
    real, tries = served.server._bound, list[int]()

    def bound(max_connections: int) -> Any:
        tries.append(len(tries) + 1)
        with socket.create_server((HOST, served.port)) if len(tries) <= num_tries else nullcontext():
            return real(max_connections)

    monkeypatch.setattr(served.server, "_bound", bound)
    return tries


async def test_a_server_that_cannot_be_built_ends_the_process_and_the_health_page_says_so(
    mortal: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five tries, then `run` raises what the process exits with."""
    take_port(mortal, monkeypatch, num_tries=1000)
    metrics = MetricsServer(listen_for_metrics(HOST, 0), lambda page: None, is_serving=mortal.server.is_answering)
    async with metrics, httpx.AsyncClient(verify=False) as http:
        assert (await http.get(metrics.url)).status_code == 200
        with structlog.testing.capture_logs() as logged:
            async with await http2.Connection.open(mortal.port) as connection:
                await connection.request(BAD_PATH)
                with pytest.raises(PortError, match="could not be rebuilt in 5 tries"):
                    async with asyncio.timeout(30):
                        await mortal.server.run()
        assert [line["tries"] for line in logged if "tries" in line] == [2, 3, 4, 5]
        assert (await http.get(metrics.url)).status_code == 503


async def test_a_port_that_is_free_again_in_time_is_taken(mortal: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old listener may take a moment to close."""
    tries = take_port(mortal, monkeypatch, num_tries=3)
    async with await mortal.attack():
        assert await mortal.echo() == b"here"
    assert tries == [1, 2, 3, 4]


async def test_calls_of_too_many_replaced_servers_end_as_unavailable(
    mortal: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UNAVAILABLE, so that a caller of ours asks another worker; each attack has a call of its own that never ends."""
    monkeypatch.setattr(grpc_server, "MAX_RETIRED", 2)
    async with AsyncExitStack() as channels:
        calls: list[Any] = []
        for _ in range(3):
            channel = await channels.enter_async_context(mortal.new_channel())
            calls.append(channel.unary_stream("/test/Hang")(b"", wait_for_ready=True))
            assert await calls[-1].read() == b"begun"
            async with await mortal.attack():
                pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(20):
                await calls[0].read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not any(call.done() for call in calls[1:])


async def test_replaced_servers_go_when_their_calls_have_ended_whatever_the_attacker_keeps_open(mortal: Served) -> None:
    """The connection of the attack stays open, with the stream that was never answered."""
    async with AsyncExitStack() as attacks:
        connections = [await attacks.enter_async_context(await mortal.attack()) for _ in range(3)]
        await until(lambda: not mortal.server._retired)
        for connection in connections:
            async with asyncio.timeout(20):
                while await connection.read() is not None:
                    pass


# -- limits on connections


async def test_connections_beyond_the_bound_are_closed_and_others_served() -> None:
    least = server_settings.MIN_CONNECTIONS
    async with Served(Settings(max_connections=least)) as served:
        assert await served.echo() == b"here"
        connections = [await http2.Connection.open(served.port) for _ in range(3 * least)]
        assert least // 2 <= sum([await connection.read() is not None for connection in connections]) <= least
        for connection in connections:
            await connection.close()
        assert await served.echo() == b"here"


async def test_streams_beyond_the_bound_of_a_connection_wait_at_the_caller() -> None:
    async with Served(Settings(max_concurrent_streams=2)) as served:
        await served.channel.channel_ready()  # now the caller knows the bound
        calls = [served.channel.unary_stream("/test/Hang")(b"") for _ in range(5)]
        begun = [asyncio.create_task(call.read()) for call in calls]
        await until(lambda: sum(task.done() for task in begun) >= 2)
        await asyncio.sleep(0.3)
        # No stream is ended: one that takes the place of another at once may be refused by gRPC, which still counts the other.
        assert [task.result() for task in begun if task.done()] == [b"begun"] * 2
        for call in calls:
            call.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


async def test_an_old_connection_takes_no_new_calls_and_keeps_those_that_it_has() -> None:
    """The age is over many times while the call runs; nothing ends it, and calls after it are served."""
    async with Served(Settings(max_connection_age=0.2)) as served:
        call = served.channel.unary_stream("/test/Count")(b"4")
        for number in range(4):
            served.counting.go_on.release()
            assert await call.read() == b"%d" % number
            async with await http2.Connection.open(served.port) as other, asyncio.timeout(20):
                while await other.read() is not None:
                    pass  # it has no call, and is closed
            assert await served.channel.unary_unary("/test/Echo")(b"x", wait_for_ready=True) == b"x"
        assert await call.read() is grpc.aio.EOF


async def test_a_peer_that_answers_no_ping_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that lost its power: its connection is open for ever, as far as TCP knows."""
    monkeypatch.setattr(server_settings, "PING_TIMEOUT_SECONDS", 0.2)
    async with (
        Served(Settings(ping_seconds=1)) as served,
        await http2.Connection.open(served.port) as connection,
        asyncio.timeout(30),
    ):
        while await connection.read(answer=False) is not None:
            pass


@pytest.mark.parametrize(
    ("name", "value"),
    [("ping_seconds", 0), ("max_connections", 15), ("max_concurrent_streams", 0), ("max_connection_age", -1)],
)
def test_each_setting_has_a_bound_and_a_refusal(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        Settings.model_validate({name: value})


@pytest.mark.parametrize(
    ("limits", "expected", "raised_to"),
    [
        ((1024, 1 << 20), 4096, 4096 + server_settings.SPARE_DESCRIPTORS),
        ((1 << 20, 1 << 20), 4096, None),
        ((1024, 1024), 1024 - server_settings.SPARE_DESCRIPTORS, None),
        ((100, 120), server_settings.MIN_CONNECTIONS, 120),
    ],
)
def test_connections_are_bounded_by_what_the_system_allows(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], expected: int, raised_to: int | None
) -> None:
    """`ulimit -n` is 1024 in many shells; the process raises its own limit as far as it may, and says so where it may not."""
    raised: list[int] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    monkeypatch.setattr("resource.setrlimit", lambda _, to: raised.append(to[0]))
    with structlog.testing.capture_logs() as logged:
        assert descriptors_for_connections(Settings().max_connections) == expected
    assert raised == ([] if raised_to is None else [raised_to])
    assert bool(logged) == (expected < 4096)
