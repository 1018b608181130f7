"""Calls go to the manager that leads, whichever of several that is, and the moment that there is one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvpool.process import manager_channel
from kvpool.process.address import manager_addresses, require_managers
from kvpool.process.manager_channel import ManagerChannel, is_single
from kvpool.v1 import cache_pb2 as pb

SERVICE = "kvpool.v1.CacheService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Peer:
    """A server of Describe, whose epoch is its name, and of Watch."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.health: Any = health.aio.HealthServicer()
        self.server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        self.port = 0
        self.is_frozen = False

    async def start(self, leads: bool) -> None:
        async def describe(_: bytes, context: Any) -> bytes:
            while self.is_frozen:
                await asyncio.sleep(0.01)
            return pb.DescribeResponse(epoch=self.name).SerializeToString()

        async def watch(_: bytes, context: Any) -> AsyncIterator[bytes]:
            yield pb.WatchResponse(contents=pb.Contents(epoch=self.name)).SerializeToString()

        methods: dict[str, Any] = {
            "Describe": grpc.unary_unary_rpc_method_handler(describe),
            "Watch": grpc.unary_stream_rpc_method_handler(watch),
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.lead(leads)
        await self.server.start()

    async def lead(self, leads: bool = True) -> None:
        await self.health.set(SERVICE, SERVING if leads else NOT_SERVING)


@contextlib.asynccontextmanager
async def peers(*lead: bool) -> AsyncIterator[list[Peer]]:
    started = [Peer(number) for number in range(1, len(lead) + 1)]
    for peer, leads in zip(started, lead, strict=True):
        await peer.start(leads)
    try:
        yield started
    finally:
        for peer in started:
            peer.is_frozen = False
            await peer.server.stop(0)


def channel_to(*to: Peer, file: Path | None = None) -> contextlib.aclosing[ManagerChannel]:
    """A channel that is given the addresses, or a file that lists them."""
    addresses = ",".join(f"127.0.0.1:{peer.port}" for peer in to)
    if file is not None:
        file.write_text(addresses)
    return contextlib.aclosing(ManagerChannel(addresses if file is None else f"file:{file}"))


async def who(channel: ManagerChannel, seconds: float = 30.0) -> int:
    answer = await channel.stub.Describe(pb.DescribeRequest(), timeout=seconds, wait_for_ready=True)
    return int(answer.epoch)


@pytest.mark.parametrize("are_in_a_file", [False, True])
async def test_calls_go_to_the_one_that_leads_or_wait_for_it_if_they_may(are_in_a_file: bool, tmp_path: Path) -> None:
    async with (
        peers(False, False, False) as three,
        channel_to(*three, file=tmp_path / "managers" if are_in_a_file else None) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stub.Describe(pb.DescribeRequest(), timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        asking = asyncio.create_task(who(channel))
        await asyncio.sleep(0.2)
        assert not asking.done()
        await three[1].lead()
        assert await asking == 2
        assert [await who(channel) for _ in range(6)] == [2] * 6
        call = channel.stub.Watch(pb.WatchRequest())
        message: Any = await call.read()
        assert message.contents.epoch == 2
        call.cancel()


async def test_the_next_leader_is_found_when_the_first_dies() -> None:
    async with peers(True, False) as two, channel_to(*two) as channel:
        assert await who(channel) == 1
        await two[0].server.stop(0)
        await two[1].lead()
        found = 0
        while not found:
            with contextlib.suppress(grpc.aio.AioRpcError):  # a call may meet the end of the first
                found = await who(channel)
        assert found == 2


async def test_one_that_is_frozen_and_has_said_that_it_leads_is_not_asked_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its calls time out. A new channel hears of its health anew: it answers nothing, or by now something else."""
    monkeypatch.setattr(manager_channel, "RENEW_SECONDS", 0.0)
    async with peers(True, False) as two, channel_to(*two) as channel:
        assert await who(channel) == 1
        first, two[0].is_frozen = two[0], True
        await two[1].lead()
        stubs = [await channel.present()]
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await who(channel, 0.2) == 2:
                pass
        await first.lead(False)
        stubs.append(await channel.present())
        assert stubs[0] is not stubs[1]
        assert [await who(channel) for _ in range(4)] == [2] * 4


async def test_a_name_that_means_several_is_all_of_them_and_is_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manager_channel, "RENEW_SECONDS", 0.0)
    addresses = ["127.0.0.3", "127.0.0.2"]
    lookups = []

    async def getaddrinfo(self: Any, host: str, port: int, **_: Any) -> list[Any]:
        lookups.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    async with peers(True) as (peer,), contextlib.aclosing(ManagerChannel(f"manager:{peer.port}")) as channel:
        with pytest.raises(grpc.aio.AioRpcError):  # nobody listens there
            await channel.stub.Describe(pb.DescribeRequest(), timeout=5)
        addresses.append("127.0.0.1")
        assert await who(channel) == 1
        assert lookups == ["manager", "manager"]


async def test_a_file_may_come_later_and_list_another_manager_when_the_first_has_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(manager_channel, "RENEW_SECONDS", 0.0)
    file = tmp_path / "managers"
    async with peers(True, True) as two, contextlib.aclosing(ManagerChannel(f"file:{file}")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stub.Describe(pb.DescribeRequest(), timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        for peer in two:
            file.write_text(f"127.0.0.1:{peer.port}\n")
            assert await who(channel) == peer.name
            await peer.server.stop(0)
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.stub.Describe(pb.DescribeRequest(), timeout=30)


@pytest.mark.parametrize(
    ("content", "listed"), [("a:1, b:2\n[::1]:3\n", ("a:1", "b:2", "[::1]:3")), ("", ()), ("a:1 b", ())]
)
def test_a_file_lists_addresses_or_none(tmp_path: Path, content: str, listed: tuple[str, ...]) -> None:
    file = tmp_path / "managers"
    require_managers(f"file:{file}")
    assert manager_addresses(f"file:{file}") == ()
    file.write_text(content)
    assert manager_addresses(f"file:{file}") == listed
    if listed:
        assert manager_addresses(content.replace("\n", ",").rstrip(",")) == listed


@pytest.mark.parametrize(
    ("managers", "single"),
    [
        ("127.0.0.1:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("manager:1", False),
        ("1.2.3.4:1,1.2.3.5:1", False),
        ("file:/run/managers", False),
    ],
)
def test_one_address_needs_no_look_up(managers: str, single: bool) -> None:
    assert is_single(managers) == single


@pytest.mark.parametrize("text", ["", ",", "a", "a:1,", "a:1,b", "a:0", "a:65536", ":1", "::1:50051", "a:b"])
def test_what_is_no_list_of_addresses_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="needed host:port"):
        require_managers(text)
    with pytest.raises(ValueError, match="needed the path"):
        require_managers("file:")
