"""Contents of Watch over a real channel, and the client that follows them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.election.file import FileEpochs
from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.settings import ManagerSettings
from kvpool.cache_service.watching import contents
from kvpool.client import Client, ContentsView, ManagerAway
from kvpool.client.watch import WatchUpdate
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests.cache_service.core.contents_follower import held_by
from tests.cache_service.edge.peer import Worker, item, key, prompt
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


async def next_update(updates: AsyncGenerator[WatchUpdate, None]) -> WatchUpdate:
    async with asyncio.timeout(20):
        return await anext(updates)


async def until_equal(updates: AsyncGenerator[WatchUpdate, None], view: ContentsView, manager: CacheManager) -> None:
    """Apply messages until the view has what look-ups find."""
    while not view.is_complete or held_in(view) != held_at(manager):
        update = await next_update(updates)
        if isinstance(update, pb.Contents):
            view.apply(update)


async def read(call: Any) -> pb.Contents:
    """The next message that has contents."""
    async with asyncio.timeout(20):
        while not (message := await call.read()).HasField("contents"):
            pass
    contents: pb.Contents = message.contents
    return contents


async def compute(worker: Worker, name: str, text: bytes) -> None:
    """A sequence comes, is computed and goes: its blocks stay as cache."""
    await worker.allocate(item(name, text))
    await worker.free(pb.SequenceUpdate(key=key(name), num_computed_tokens=len(text) // 4))


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
    view = ContentsView()
    while not view.is_complete:
        view.apply(await read(first))
    first.cancel()
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
    message = await read(call)
    assert message.whole_begins
    view = ContentsView()
    view.apply(message)
    while not view.is_complete:
        view.apply(await read(call))
    assert held_in(view) == held_at(server.manager)


async def test_a_new_manager_lists_what_its_workers_report(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The client goes on by itself, and its view is that of the new manager."""
    folder = tmp_path_factory.mktemp("state")
    view = ContentsView()
    with contextlib.closing(FileEpochs.open(folder)) as epochs:
        server = ManagerServer(ManagerSettings(port=0, state_dir=folder), epochs)
        await server.start()
        port = server.port
        client = Client(f"127.0.0.1:{port}")
        updates = client.watch(pictures=False, contents=True)
        await until_equal(updates, view, server.manager)
        await server.stop()
        assert isinstance(await _until_away(updates), ManagerAway)
    with contextlib.closing(FileEpochs.open(folder)) as epochs:
        async with ManagerServer(ManagerSettings(port=port, state_dir=folder), epochs) as server:
            view.is_complete = False
            await until_equal(updates, view, server.manager)
            assert view.epoch == server.manager.epoch
    await updates.aclose()
    await client.close()


async def _until_away(updates: AsyncGenerator[WatchUpdate, None]) -> WatchUpdate:
    while not isinstance(update := await next_update(updates), ManagerAway):
        pass
    return update


async def test_a_follower_too_slow_for_the_ring_gets_the_whole_state_anew(
    server: ManagerServer, stub: Stub, worker: Worker
) -> None:
    server._servicer.watching._contents._max_events = 4
    await compute(worker, "a", prompt(10))
    call = stub.Watch(pb.WatchRequest(contents=pb.ContentsOptions()))
    view = ContentsView()
    while not view.is_complete:
        view.apply(await read(call))
    call.cancel()
    for index in range(4):
        await compute(worker, f"more-{index}", prompt(10, first=100 + index))
    call = stub.Watch(pb.WatchRequest(contents=pb.ContentsOptions(epoch=view.epoch, after=view.number)))
    message = await read(call)
    assert message.whole_begins
    view.apply(message)
    while not view.is_complete or held_in(view) != held_at(server.manager):
        view.apply(await read(call))


async def test_nothing_is_kept_when_nobody_follows(server: ManagerServer, stub: Stub, worker: Worker) -> None:
    feed = server._servicer.watching._contents
    call = stub.Watch(pb.WatchRequest(contents=pb.ContentsOptions()))
    await read(call)
    assert server.manager.contents is not None
    call.cancel()
    async with asyncio.timeout(20):
        while feed.num_followers:
            await asyncio.sleep(0.01)
    assert feed._ending is not None
    feed._end()
    assert server.manager.contents is None
    assert server.manager._tree.journal is None


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
    await until(lambda: manager.contents is None)
