"""What is refused before a servicer sees it: bytes that are no message, and too many of them; for every kind of method."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc
import pytest
import structlog
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvpool.process.call_status import details_of
from kvpool.process.rare_line import RareLine
from kvpool.process.request_guard import SMALL, RequestGuard, RequestLimit
from tests import http2
from tests.until import until

NO_MESSAGE = bytes.fromhex("0a04fffefdfc")
"""A field of four bytes that are no UTF-8."""
LIMIT = 1 << 20
INVALID = grpc.StatusCode.INVALID_ARGUMENT


class Echo:
    """One method of each kind."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def unary(self, request: StringValue, context: Any) -> StringValue:
        self.num_calls += 1
        return request

    async def stream(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        self.num_calls += 1
        yield request
        yield request

    async def written(self, request: StringValue, context: Any) -> None:
        """A stream without a generator, as grpc's own health service has one."""
        self.num_calls += 1
        await context.write(request)
        await context.write(request)

    async def collect(self, requests: AsyncIterator[StringValue], context: Any) -> StringValue:
        self.num_calls += 1
        return StringValue(value="".join([request.value async for request in requests]))

    async def both(self, requests: AsyncIterator[StringValue], context: Any) -> AsyncIterator[StringValue]:
        self.num_calls += 1
        async for request in requests:
            yield request


class Served(NamedTuple):
    echo: Echo
    guard: RequestGuard
    channel: Any
    port: int
    refused: list[tuple[str, str]]
    """What the guard has told of."""


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    echo, refused = Echo(), []
    guard = RequestGuard()
    guard.protect(
        {"/test/Unary": RequestLimit(LIMIT, "send less (--test)"), "/test/Stream": RequestLimit(LIMIT)},
        lambda *what: refused.append(what),
    )
    server = grpc.aio.server(interceptors=(guard,), options=(("grpc.so_reuseport", 0),))
    codec: Any = (StringValue.FromString, StringValue.SerializeToString)
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(echo.unary, *codec),
        "Stream": grpc.unary_stream_rpc_method_handler(echo.stream, *codec),
        "Written": grpc.unary_stream_rpc_method_handler(echo.written, *codec),
        "Collect": grpc.stream_unary_rpc_method_handler(echo.collect, *codec),
        "Both": grpc.stream_stream_rpc_method_handler(echo.both, *codec),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    reflection.enable_server_reflection(("test",), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(echo, guard, channel, port, refused)
    await server.stop(0)


async def call(channel: Any, method: str, request: bytes) -> list[bytes]:
    """Send raw bytes; what comes back."""
    kind = method.rpartition("/")[2]
    if kind in ("Unary", "Check"):
        return [await channel.unary_unary(method)(request)]
    if kind in ("Stream", "Written", "Watch"):
        return [message async for message in channel.unary_stream(method)(request)]
    if kind == "Collect":
        return [await channel.stream_unary(method)(iter((request,)))]
    return [message async for message in channel.stream_stream(method)(iter((request,)))]


async def refusal(channel: Any, method: str, request: bytes) -> tuple[str, str]:
    """Reason and message of a call that is refused, which it must be."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, method, request)
    assert caught.value.code() is INVALID
    return details_of(caught.value).reason, caught.value.details() or ""


OURS = ("/test/Unary", "/test/Stream", "/test/Written", "/test/Collect", "/test/Both")
OTHERS = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


@pytest.mark.parametrize("method", OURS)
async def test_a_good_request_reaches_its_servicer(served: Served, method: str) -> None:
    request = StringValue(value="x" * 1000).SerializeToString()
    assert set(await call(served.channel, method, request)) == {request}
    assert served.refused == []
    assert served.guard.num_calls == 0


@pytest.mark.parametrize("method", OURS + OTHERS)
async def test_bytes_that_are_no_message_are_one_status_and_one_line(
    served: Served, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with structlog.testing.capture_logs() as logged:
        for _ in range(20):
            reason, message = await refusal(served.channel, method, NO_MESSAGE)
            assert reason == "MALFORMED"
            assert method.rpartition("/")[2] in message
    (line,) = logged
    assert (line["event"], line["count"]) == ("requests refused before they were read", 1)
    assert line["method"] == method
    # grpcio may still wake up the loop of an earlier test, which is closed: that says nothing of these requests.
    assert [record for record in caplog.records if "PollerCompletionQueue" not in record.getMessage()] == []
    assert served.refused == [(method, "MALFORMED")] * 20


@pytest.mark.parametrize(
    ("method", "limit"),
    [("/test/Unary", LIMIT), ("/test/Stream", LIMIT), *((method, SMALL.num_bytes) for method in OURS[2:] + OTHERS)],
)
async def test_a_request_over_its_limit_is_refused_with_the_figures(served: Served, method: str, limit: int) -> None:
    """A method that is in no table has the small limit; at the limit itself a request is read."""
    reason, message = await refusal(served.channel, method, bytes(limit + 1))
    assert reason == "TOO_LARGE"
    assert f"may have {limit} bytes, this one has {limit + 1}" in message
    if method == "/test/Unary":
        assert message.endswith("send less (--test)")
    assert served.echo.num_calls == (method in ("/test/Collect", "/test/Both"))
    head = StringValue(value="x" * limit).ByteSize() - limit
    request = StringValue(value="x" * (limit - head)).SerializeToString()
    assert len(request) == limit
    if method in OURS:
        assert set(await call(served.channel, method, request)) == {request}


async def test_a_method_that_nobody_serves_leaves_nothing_behind(served: Served) -> None:
    for number in range(20):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.channel.unary_unary(f"/test/Invented{number}")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert served.guard._guarded == {}


async def test_a_reader_that_leaves_ends_its_servicer(served: Served) -> None:
    """Also while a message waits for it: no window, so the first one does."""
    no_window: dict[int, int] = {http2.Setting.INITIAL_WINDOW_SIZE: 0}
    async with await http2.Connection.open(served.port, no_window) as connection:
        await connection.request(b"/test/Stream", StringValue(value="x").SerializeToString())
        while (frame := await connection.read()) is not None and frame.kind != http2.Kind.HEADERS:
            pass
        assert served.guard.num_calls == 1
    await served.guard.wait_until_idle()


async def test_a_line_a_minute_with_the_count() -> None:
    """The second minute's line has all that came in the first one after its first; a quiet minute has none."""
    now = 0.0
    line = RareLine(structlog.get_logger(), "it happened", interval_seconds=60, clock=lambda: now)
    with structlog.testing.capture_logs() as logged:
        for number, at in enumerate([0.0] * 5 + [60.0, 200.0]):
            now = at
            line.note(number=number)
    assert [(entry["count"], entry["number"]) for entry in logged] == [(1, 0), (5, 5), (1, 6)]


async def test_the_count_is_logged_though_nothing_follows() -> None:
    line = RareLine(structlog.get_logger(), "it happened", interval_seconds=0.05)
    with structlog.testing.capture_logs() as logged:
        for _ in range(5):
            line.note()
        await until(lambda: sum(entry["count"] for entry in logged) == 5)
    assert logged[0]["count"] == 1
