"""Contents of Watch over a real channel, and the client that follows them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.watching import contents
from kvpool.client import Client, ContentsView
from kvpool.client.watch import WatchUpdate
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests.cache_service.core.contents_follower import held_by
from tests.cache_service.edge.peer import Worker, item, prompt, update
from tests.until import until

Stub = cache_pb2_grpc.CacheServiceStub


def held_in(view: ContentsView) -> dict[int, set[tuple[int, tuple[bytes, ...]]]]:
    """By session: the salt's number and the blocks of tokens up to each node that is a hit there."""
    held: dict[int, set[tuple[int, tuple[bytes, ...]]]] = {}
    for node in view.nodes.values():
        path = node.path()
        for session in node.sessions:
            held.setdefault(session, set()).add((path[0].salt_number, tuple(one.tokens for one in path)))
    return held


def held_at(manager: CacheManager) -> dict[int, set[tuple[int, tuple[bytes, ...]]]]:
    """The same, read from the manager's pools."""
    held = held_by(manager)
    return {session: {(salt, tokens) for salt, (_, _, tokens) in held[session, group]} for session, group in held}


async def until_equal(updates: AsyncGenerator[WatchUpdate, None], view: ContentsView, manager: CacheManager) -> None:
    while not view.is_complete or held_in(view) != held_at(manager):
        async with asyncio.timeout(20):
            received = await anext(updates)
        if isinstance(received, pb.Contents):
            view.apply(received)


async def read(call: Any) -> pb.Contents:
    async with asyncio.timeout(20):
        while not (message := await call.read()).HasField("contents"):
            pass
    contents: pb.Contents = message.contents
    return contents


async def whole(call: Any) -> ContentsView:
    """The state that comes first."""
    message = await read(call)
    assert message.whole_begins
    view = ContentsView()
    view.apply(message)
    while not view.is_complete:
        view.apply(await read(call))
    return view


async def compute(worker: Worker, name: str, text: bytes) -> None:
    """A sequence comes, is computed and goes: its blocks stay as cache."""
    await worker.allocate(item(name, text))
    await worker.free(update(name, len(text) // 4))


@pytest.fixture
async def updates(server: ManagerServer) -> AsyncIterator[AsyncGenerator[WatchUpdate, None]]:
    async with (
        Client(f"127.0.0.1:{server.port}") as client,
        contextlib.aclosing(client.watch(pictures=False, contents=True)) as updates,
    ):
        yield updates


async def test_what_is_cached_comes_first_and_then_what_changes(
    server: ManagerServer, worker: Worker, updates: AsyncGenerator[WatchUpdate, None]
) -> None:
    await compute(worker, "a", prompt(10))
    view = ContentsView()
    await until_equal(updates, view, server.manager)
    assert view.nodes
    await compute(worker, "b", prompt(10) + prompt(8, first=70))
    await until_equal(updates, view, server.manager)
    assert sum(node.num_served_tokens for node in view.nodes.values()) > 0, "b was served what a had computed"
    await worker.deregister()
    await until_equal(updates, view, server.manager)
    assert held_in(view) == {}


async def test_a_follower_that_comes_back_gets_only_what_it_has_missed(
    server: ManagerServer, stub: Stub, worker: Worker
) -> None:
    await compute(worker, "a", prompt(10))
    first = stub.Watch(pb.WatchRequest(contents=pb.ContentsOptions()))
    view = await whole(first)
    first.cancel()
    await until(lambda: not server._servicer.watching._contents.num_followers)
    await compute(worker, "b", prompt(10, first=9))
    again = stub.Watch(pb.WatchRequest(contents=pb.ContentsOptions(epoch=view.epoch, after=view.number)))
    number = view.number
    while held_in(view) != held_at(server.manager):
        message = await read(again)
        assert not message.whole_begins
        assert [event.number for event in message.events] == [*range(number + 1, number + 1 + len(message.events))]
        view.apply(message)
        number = view.number


@pytest.mark.parametrize("epoch", [0, 1, 99])
async def test_one_that_names_what_is_not_known_gets_the_whole_state(
    server: ManagerServer, stub: Stub, worker: Worker, epoch: int
) -> None:
    await compute(worker, "a", prompt(10))
    call = stub.Watch(pb.WatchRequest(contents=pb.ContentsOptions(epoch=epoch, after=1 << 60)))
    assert held_in(await whole(call)) == held_at(server.manager)


async def test_a_follower_too_slow_for_the_ring_gets_the_whole_state_anew(
    server: ManagerServer, stub: Stub, worker: Worker
) -> None:
    server._servicer.watching._contents._max_events = 4
    await compute(worker, "a", prompt(10))
    call = stub.Watch(pb.WatchRequest(contents=pb.ContentsOptions()))
    view = await whole(call)
    call.cancel()
    for index in range(4):
        await compute(worker, f"more-{index}", prompt(10, first=100 + index))
    call = stub.Watch(pb.WatchRequest(contents=pb.ContentsOptions(epoch=view.epoch, after=view.number)))
    view = await whole(call)
    while held_in(view) != held_at(server.manager):
        view.apply(await read(call))


async def test_the_journal_is_kept_for_a_follower_that_has_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end that was set when the last one left is called off; it comes when this one has left too."""
    monkeypatch.setattr(contents, "LINGER_SECONDS", 0.02)
    manager = CacheManager(1)
    feed = contents.ContentsFeed(manager, 100)
    async with contextlib.aclosing(feed.follow(pb.ContentsOptions())) as first:
        await anext(first)
    async with contextlib.aclosing(feed.follow(pb.ContentsOptions())) as second:
        await anext(second)
        await asyncio.sleep(0.05)
        assert manager.contents is not None
    await until(lambda: manager.contents is manager._tree.journal is None)
