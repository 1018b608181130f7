"""Pictures of Watch over a real channel, and the client that follows them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
import pytest

from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.settings import ManagerSettings
from kvpool.client import (
    Client,
    ContentsView,
    InvalidRequest,
    ManagerAway,
    NotFound,
    PictureView,
    SyncClient,
    WorkerView,
)
from kvpool.client import watch as watch_module
from kvpool.client.watch import WatchUpdate
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests.cache_service.edge.conftest import running
from tests.cache_service.edge.peer import ROOT, Worker, item, prompt, refused, registration, update
from tests.cluster.cluster import free_port
from tests.until import until

Stub = cache_pb2_grpc.CacheServiceStub

ALL = pb.WatchRequest(picture=pb.PictureOptions(interval_ms=100, include_blocks=True, max_sequences=10))


async def read(call: grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.WatchResponse]) -> pb.Picture:
    message = await call.read()
    assert isinstance(message, pb.WatchResponse)
    return message.picture


async def next_complete(updates: AsyncGenerator[WatchUpdate, None], view: PictureView) -> None:
    async with asyncio.timeout(20):
        async for received in updates:
            if isinstance(received, pb.Picture) and view.apply(received):
                return


async def until_seen(
    updates: AsyncGenerator[WatchUpdate, None], view: PictureView, is_so: Callable[[PictureView], bool]
) -> None:
    await next_complete(updates, view)
    while not is_so(view):
        await next_complete(updates, view)


async def until_away(updates: AsyncGenerator[WatchUpdate, None]) -> ManagerAway:
    async with asyncio.timeout(20):
        while not isinstance(received := await anext(updates), ManagerAway):
            pass
    return received


async def assert_equals_describe(stub: Stub, view: WorkerView) -> None:
    request = pb.DescribeRequest(worker_id=view.description.worker_id, include_blocks=True, max_sequences=1000)
    (worker,) = (await stub.Describe(request)).workers
    pool = view.pools[0]
    pool.grow(worker.kv_cache_config.pools[0].num_blocks)
    for block in worker.blocks:
        assert (pool.states[block.block_id], pool.ref_counts[block.block_id]) == (block.state, block.ref_count)
    assert list(view.sequences.values()) == list(worker.sequences)
    assert view.description.counts == worker.counts


async def test_a_view_put_together_from_changes_equals_describe(
    server: ManagerServer, stub: Stub, worker: Worker
) -> None:
    view = PictureView()
    async with Client(f"127.0.0.1:{server.port}") as client:
        watching = client.watch(interval=0.1, blocks=True, max_sequences=10)
        async with contextlib.aclosing(watching) as updates:
            await next_complete(updates, view)
            await assert_equals_describe(stub, view.workers[worker.session])
            await worker.allocate(item("a", prompt(10)), wish=2)
            await until_seen(updates, view, lambda view: bool(view.workers[worker.session].sequences))
            await assert_equals_describe(stub, view.workers[worker.session])
            assert view.workers[worker.session].description.num_sequences == 1
            await worker.free(update("a", 10))
            await until_seen(updates, view, lambda view: not view.workers[worker.session].sequences)
            await assert_equals_describe(stub, view.workers[worker.session])
            assert max(view.workers[worker.session].pools[0].last_used) <= view.number
            second = await Worker.begin(stub, registration("second"))
            await worker.deregister()
            await until_seen(updates, view, lambda view: view.workers.keys() == {second.session})


async def test_the_blocking_client_watches_too(server: ManagerServer, worker: Worker) -> None:
    def look() -> PictureView:
        view = PictureView()
        with (
            SyncClient(f"127.0.0.1:{server.port}") as client,
            contextlib.closing(client.watch(interval=0.1)) as updates,
        ):
            for received in updates:
                if isinstance(received, pb.Picture) and view.apply(received) and view.number > 1:
                    break
        return view

    view = await asyncio.wait_for(asyncio.to_thread(look), 20)
    assert view.workers.keys() == {worker.session}


async def test_salts_are_numbers_and_never_text(stub: Stub, worker: Worker) -> None:
    secret = item("a", prompt(10))
    secret.root.tenant_salt = "the tenant's secret"
    await worker.allocate(item("b", prompt(5)), secret)
    call = stub.Watch(ALL)
    picture = await read(call)
    view = PictureView()
    assert view.apply(picture)
    assert sorted(view.workers[worker.session].pools[0].salt_numbers)[-4:] == [0, 1, 1, 1]
    block = view.workers[worker.session].pools[0].salt_numbers.index(1)
    described = await stub.DescribeBlock(pb.DescribeBlockRequest(worker_id="w", block_id=block))
    assert described.salt_number == 1
    assert b"secret" not in picture.SerializeToString() + described.SerializeToString()
    call.cancel()


async def test_a_picture_that_was_not_read_is_never_sent(stub: Stub, worker: Worker, server: ManagerServer) -> None:
    """A viewer that reads late finds few pictures, and the last of them is the present."""
    await worker.allocate(item("a", prompt(10)))
    source = server._servicer.watching.serve(ALL, "", lambda: None)
    view = PictureView()
    view.apply((await anext(source)).picture)
    for number in range(3):
        await worker.allocate(item(f"more {number}", prompt(3, first=100 * number)))
        await asyncio.sleep(0.15)
    missed = (await anext(source)).picture
    assert view.apply(missed)
    await assert_equals_describe(stub, view.workers[worker.session])
    await source.aclose()


async def test_what_has_not_changed_is_not_sent_again_and_nothing_is_kept_once_the_last_viewer_has_left(
    server: ManagerServer, stub: Stub, worker: Worker
) -> None:
    await worker.allocate(item("a", prompt(10)))
    call = stub.Watch(ALL)
    first = await read(call)
    assert (first.whole, first.complete, len(first.workers)) == (True, True, 1)
    second = await read(call)
    assert (second.whole, second.complete) == (False, True)
    assert not second.workers
    assert not second.HasField("cluster")
    (session,) = server.manager.sessions
    assert session.pools[0].changes is not None
    call.cancel()
    await until(lambda: not len(server._servicer.watching.places))
    assert session.pools[0].changes is None
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "manager-pictures" and not task.cancelling()]


@pytest.mark.parametrize("options", [None, {"interval_ms": 99}, {"interval_ms": 10_001}, {"worker_id": "w" * 129}])
async def test_bad_options_are_refused(stub: Stub, options: dict[str, Any] | None) -> None:
    request = pb.WatchRequest(picture=None if options is None else pb.PictureOptions(**options))
    await refused(stub.Watch(request).read(), "BAD_FIELD")


async def test_a_manager_that_stops_ends_the_stream_with_unavailable(server: ManagerServer, stub: Stub) -> None:
    call = stub.Watch(pb.WatchRequest(picture=pb.PictureOptions(interval_ms=10_000)))
    await call.read()
    server._servicer.refuse_calls()
    async with asyncio.timeout(5):
        await refused(call.read(), "RECOVERING")
    server._servicer._stopping = False  # Check, at the end


async def test_a_stream_ends_with_the_age_of_a_connection(server: ManagerServer, stub: Stub) -> None:
    server._servicer.watching._max_seconds = 0.2
    call = stub.Watch(ALL)
    async with asyncio.timeout(20):
        while await call.read() is not grpc.aio.EOF:
            pass
    assert await call.code() is grpc.StatusCode.OK


async def test_views_come_through_a_restart_of_the_manager(settings: ManagerSettings) -> None:
    settings = settings.model_copy(update={"port": free_port()})
    view, contents = PictureView(), ContentsView()
    async with (
        Client(f"127.0.0.1:{settings.port}") as client,
        contextlib.aclosing(client.watch(interval=0.1, blocks=True, contents=True)) as updates,
        asyncio.timeout(60),
    ):
        for epoch in (1, 2):
            async with running(settings):
                contents.is_complete = False
                while not (view.epoch == contents.epoch == epoch and contents.is_complete):
                    received = await anext(updates)
                    if isinstance(received, pb.Picture):
                        view.apply(received)
                    elif isinstance(received, pb.Contents):
                        contents.apply(received)
            await until_away(updates)


async def test_one_block_is_described_with_its_prefix_and_its_owners(server: ManagerServer, worker: Worker) -> None:
    table = list((await worker.grant("a", prompt(10))).tables[0].block_ids)
    await worker.append(update("a", 8, start=10))
    await worker.allocate(item("b", prompt(9)))
    async with Client(f"127.0.0.1:{server.port}") as client:
        sealed = await client.describe_block("w", table[1])
        assert sealed.block.sealed
        assert [owner.sequence_id for owner in sealed.block.owners] == ["a", "b"]
        assert (sealed.tokens, list(sealed.prefix_block_ids)) == (prompt(8), table[:2])
        owns = [own for own in sealed.owner_block_ids if own != table[2]]
        assert len(owns) == len(sealed.owner_block_ids) - 1 == 1, "the third blocks of both"
        assert sealed.root == ROOT
        filling = await client.describe_block("w", table[2])
        assert (filling.block.sealed, filling.block.table_index, filling.tokens) == (False, 2, prompt(10))
        assert (list(filling.prefix_block_ids), list(filling.owner_block_ids)) == (table, [])
        free = await client.describe_block("w", 16)
        assert (free.block.state, free.tokens, free.HasField("root")) == (pb.BLOCK_STATE_FREE, b"", False)
        with pytest.raises(InvalidRequest, match="blocks 1 to 16"):
            await client.describe_block("w", 17)
        with pytest.raises(NotFound):
            await client.describe_block("stranger", 1)


async def test_a_manager_that_says_nothing_is_noticed_and_asked_again(
    server: ManagerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen manager closes no connection; silence is the only sign."""
    monkeypatch.setattr(watch_module, "_SILENCE_SECONDS", 0.5)
    serve = server._servicer.watching.serve
    calls = []

    async def freeze_once(request: pb.WatchRequest, *about: Any) -> AsyncGenerator[pb.WatchResponse, None]:
        calls.append(request)
        async with contextlib.aclosing(serve(request, *about)) as messages:
            async for message in messages:
                yield message
                if len(calls) == 1:
                    await asyncio.Event().wait()

    monkeypatch.setattr(server._servicer.watching, "serve", freeze_once)
    view = PictureView()
    async with (
        Client(f"127.0.0.1:{server.port}") as client,
        contextlib.aclosing(client.watch(interval=0.1)) as updates,
        asyncio.timeout(20),
    ):
        await next_complete(updates, view)
        assert (await until_away(updates)).error.reason == "SILENT"
        await next_complete(updates, view)
        assert len(calls) == 2
