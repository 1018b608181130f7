"""Places for streams of Watch: no peer keeps the others out, however many streams or connections it has, read or not."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.watching import places as places_module
from kvpool.cache_service.watching import stream as stream_module
from kvpool.cache_service.watching.places import TURN_SECONDS, Places, StreamPlace, host_of
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests import http2
from tests.cache_service.edge.peer import refused
from tests.until import until

ALL = pb.WatchRequest(picture=pb.PictureOptions(interval_ms=100, include_blocks=True))


class Room:
    def __init__(self, max_places: int) -> None:
        self.places = Places(max_places)
        self.lost: list[str] = []

    def take(self, peer: str, now: float) -> StreamPlace:
        def end(refusal: Refusal) -> None:
            assert refusal.reason is Reason.TOO_MANY_WATCHERS
            self.lost.append(peer)

        place = self.places.take(f"ipv4:{peer}", now, end)
        assert len(self.places) <= self.places.max_places
        return place

    def is_refused(self, peer: str, now: float) -> float:
        with pytest.raises(Refusal) as caught:
            self.take(peer, now)
        assert caught.value.reason is Reason.TOO_MANY_WATCHERS
        assert caught.value.retry_seconds is not None
        return caught.value.retry_seconds


@pytest.mark.parametrize(
    ("hoarder", "newcomer", "wait"),
    [
        (lambda number: "10.0.0.1:1", "10.0.0.2:1", 0.0),
        (lambda number: f"10.0.0.1:{number}", "10.0.0.2:1", 0.0),
        (lambda number: "10.0.0.1:1", "10.0.0.1:2", 0.0),
        (lambda number: f"10.0.0.1:{number}", "10.0.0.1:99", TURN_SECONDS),
        (lambda number: f"10.0.0.{number}:1", "10.0.1.1:1", TURN_SECONDS),
        (lambda number: "10.0.0.1:1", "10.0.0.1:1", TURN_SECONDS),
    ],
    ids=["connection", "host", "same host", "connections of its host", "hosts", "same connection"],
)
def test_a_peer_finds_a_place_whoever_has_all_of_them(
    hoarder: Callable[[int], str], newcomer: str, wait: float
) -> None:
    """At once if somebody has two more than it; else when the oldest stream has had its turn. Behind a proxy all are one peer."""
    room = Room(8)
    for number in range(8):
        room.take(hoarder(number), now=float(number) / 100)
    now = 0.5
    if wait:
        assert room.is_refused(newcomer, now) == TURN_SECONDS - now
        now = TURN_SECONDS
    assert room.lost == []
    room.take(newcomer, now)
    assert room.lost == [hoarder(0 if wait else 7)]


def test_one_stream_each_outlives_any_number_of_greedy_ones() -> None:
    """A gateway and a few that look, next to peers that open as many streams as they can: those that have one keep it."""
    draw, room = random.Random(1), Room(16)
    modest = ["10.0.0.9:1", "10.0.0.10:1", "10.0.0.1:7"]
    for now in range(300):
        if now < len(modest):
            room.take(modest[now], float(now))
        peer = draw.choice(["10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1"])
        with contextlib.suppress(Refusal):
            room.take(peer, float(now))
    assert not set(room.lost) & set(modest)
    counts = Counter(place.host for place in room.places._taken)
    assert counts["10.0.0.9"] == counts["10.0.0.10"] == 1


def test_a_place_that_is_left_is_free() -> None:
    room = Room(1)
    place = room.take("10.0.0.1:1", 0.0)
    assert room.is_refused("10.0.0.2:1", 1.0)
    room.places.leave(place)
    room.places.leave(place)
    room.take("10.0.0.2:1", 1.0)
    assert Room(0).is_refused("10.0.0.1:1", 0.0) == TURN_SECONDS


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:50051", "10.0.0.1"),
        ("ipv6:%5B2001:db8:1:2:3::1%5D:50051", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2:ffff::9]:1", "2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:50051", "10.0.0.1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5", "fe80::/64"),
        ("ipv6:odd", "ipv6"),
        ("unix:/tmp/socket", "unix"),
        ("unix:", "unix"),
        ("", ""),
    ],
)
def test_the_host_of_a_peer_is_its_address_without_the_port(peer: str, host: str) -> None:
    """With IPv6 one machine has any number of addresses of one network."""
    assert host_of(peer) == host


@contextlib.asynccontextmanager
async def watcher(
    server: ManagerServer, name: str
) -> AsyncIterator[grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.WatchResponse]]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.primary_user_agent", name)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
        yield cache_pb2_grpc.CacheServiceStub(channel).Watch(ALL)


async def read_to_the_end(call: grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.WatchResponse]) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_stream_that_loses_its_place_is_told_why(
    server: ManagerServer, stub: cache_pb2_grpc.CacheServiceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of one connection, and the second place is taken by another one; the first goes on."""
    monkeypatch.setattr(places_module, "TURN_SECONDS", 3600.0)
    places = server._servicer.watching.places
    places.max_places = 2
    first = stub.Watch(ALL)
    await first.read()
    second = stub.Watch(ALL)  # now, so that it is the newer one
    await second.read()
    async with watcher(server, "other") as other, asyncio.timeout(20):
        await other.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_the_end(second)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "given its place" in (caught.value.details() or "")
        await first.read()
        await refused(stub.Watch(ALL).read(), "TOO_MANY_WATCHERS")
    first.cancel()
    await until(lambda: not len(places))


async def test_streams_that_nobody_reads_give_their_places_too(server: ManagerServer) -> None:
    """They cannot be told; what they held at the manager is gone all the same."""
    watching = server._servicer.watching
    watching.places.max_places = 4
    async with await http2.Connection.connect(f"127.0.0.1:{server.port}") as connection:
        await connection.start((http2.Setting.INITIAL_WINDOW_SIZE, 0))
        for stream in range(1, 9, 2):
            await connection.send(http2.call(b"/kvpool.v1.CacheService/Watch", ALL.SerializeToString(), stream))
        await until(lambda: len(watching.places) == 4)
        async with watcher(server, "a") as first, watcher(server, "b") as second, asyncio.timeout(20):
            await first.read()
            await second.read()
            await until(lambda: watching._pictures._pictures.num_viewers == 4)
            await first.read()


@pytest.mark.parametrize("reads", [True, False])
async def test_a_call_that_is_sending_is_not_cancelled_before_its_reader_had_its_time(
    server: ManagerServer, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """gRPC cannot send the status of a call that is cancelled while a message is on its way: its caller would wait for ever."""
    monkeypatch.setattr(stream_module, "END_SECONDS", 3600.0 if reads else 0.0)
    watching = server._servicer.watching
    watching.places.max_places = 2
    cancelled = asyncio.Event()
    first, second = (watching.serve(ALL, "ipv4:10.0.0.1:1", cancelled.set) for _ in range(2))
    await anext(first)
    await anext(second)  # which now sends its message
    other = watching.serve(ALL, "ipv4:10.0.0.2:1", lambda: None)
    await anext(other)
    if reads:
        assert not cancelled.is_set()
        with pytest.raises(Refusal, match="given its place"):
            await anext(second)
    else:
        await cancelled.wait()
        await second.aclose()
    for source in (first, other):
        await source.aclose()
    assert not len(watching.places)
