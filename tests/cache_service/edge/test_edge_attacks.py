"""What a peer may send to a manager's port without harm to others: bad paths, and the messages of tests/attacks."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2

from kvpool.cache_service.core.messages import Limits
from kvpool.cache_service.request_sizes import SERVICE, request_limits
from kvpool.cache_service.server import ManagerServer
from kvpool.process.request_guard import SMALL
from kvpool.protocol.limits import MAX_MESSAGE_BYTES
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc, common_pb2
from tests import http2
from tests.attacks import at_manager
from tests.cache_service.edge.managers import Managers
from tests.cache_service.edge.peer import FINGERPRINT, Worker, item, prompt, refused, registration
from tests.cache_service.edge.victim import busy, goes_on, seen, state_of
from tests.rich_status import detail, field_of
from tests.scrape import scrape
from tests.until import until

Stub = cache_pb2_grpc.CacheServiceStub


async def test_sessions_blocks_and_leases_outlive_the_server(
    loop_of_grpcio: None, server: ManagerServer, worker: Worker
) -> None:
    """The worker's channel connects anew; its session is the same, and so are its table and the block counts."""
    first = await worker.allocate(item("a", prompt(9)))
    assert server.metrics is not None
    for number in range(1, 4):
        async with await http2.Connection.open(server.port) as connection:
            await connection.request(b"/\xff")
            await until(lambda number=number: server._grpc.num_rebuilds >= number)  # type: ignore[misc]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                described = await Stub(channel).Describe(pb.DescribeRequest(), wait_for_ready=True)
            assert [(found.worker_id, found.session) for found in described.workers] == [("w", worker.session)]
            assert described.epoch == worker.registered.epoch
            await worker.stub.Check(pb.CheckRequest(), wait_for_ready=True)
            assert (await worker.keep_alive()).lease_ms
            again = await worker.allocate(item("a", prompt(9)))
            assert again.results[0].granted == first.results[0].granted
        page = await scrape(server.metrics.url)
        assert page.value("kvpool_manager_server_rebuilds_total") == number


async def test_a_process_goes_on_and_ends_with_status_0(tmp_path: Path, managers: Managers) -> None:
    """With its own logging: nothing is written, by gRPC neither."""
    with managers.serving(tmp_path / "state") as (process, address, _):
        port = int(address.rpartition(":")[2])
        for _attack in range(3):
            async with await http2.Connection.open(port) as connection, asyncio.timeout(30):
                await connection.answered({await connection.request(b"/\xff") for _ in range(3)})
            async with grpc.aio.insecure_channel(address) as channel:
                assert (await Stub(channel).Describe(pb.DescribeRequest(), wait_for_ready=True, timeout=60)).epoch == 1
        process.send(signal.SIGTERM)
        assert process.wait() == 0
        assert [line["event"] for line in process.lines()] == ["stopped"]


@pytest.mark.parametrize("attack", at_manager.ALL, ids=str)
async def test_a_message_of_a_stranger_is_refused_and_changes_nothing(
    server: ManagerServer, stub: Stub, channel: grpc.aio.Channel, worker: Worker, attack: at_manager.Attack
) -> None:
    """Neither tokens nor blocks, nor a lease, a call_no, a downlink or the epoch; and the worker goes on as if nothing had been."""
    await busy(worker)
    other = await Worker.begin(stub, registration("stranger"))
    scene = at_manager.Scene(channel, await seen(stub), other.session, other.session_key, registration("one more"))
    before = state_of(server)
    status = await refused(attack.send(scene), attack.reason)
    assert state_of(server) == before
    assert not attack.field or field_of(status) == attack.field
    assert all(word in status.message for word in attack.words)
    if attack.reason in ("WORKER_ELSEWHERE", "STALE_INCARNATION"):
        assert detail(status, error_details_pb2.RetryInfo).retry_delay.ToSeconds() > 0
    await goes_on(worker)


async def test_bytes_that_are_no_message_are_counted_and_one_line(server: ManagerServer, channel: Any) -> None:
    with structlog.testing.capture_logs() as logged:
        for _ in range(10):
            await refused(channel.unary_unary(f"/{SERVICE}/Check")(at_manager.NO_MESSAGE[0]), "MALFORMED")
    assert len(logged) == 1
    assert server._servicer.counts.unread["MALFORMED"] == 10
    assert server._servicer.counts.calls["Check", "INVALID_ARGUMENT"] == 10
    assert server._servicer.counts.num_under_way == 0


def test_every_method_has_a_limit_of_its_own() -> None:
    """A new one is to be thought about: what is the largest request that is legal? What is longer than the transport takes is
    refused there."""
    limits = {path.rpartition("/")[2]: limit.num_bytes for path, limit in request_limits(Limits()).items()}
    assert limits.keys() == {path.rpartition("/")[2] for path in at_manager.PATHS}
    assert limits.pop("Register") <= 64 << 10
    assert limits.pop("Route") <= 5 << 20
    assert limits.pop("Explain") <= 5 << 20
    assert set(limits.values()) == {SMALL.num_bytes, MAX_MESSAGE_BYTES}


async def test_the_largest_legal_requests_are_taken(stub: Stub) -> None:
    """Names, groups and counts at the limits of the core; a heartbeat with the counts of a hundred groups."""
    limits = Limits()
    name = "n" * limits.max_name_bytes
    largest = registration("w" * limits.max_id_bytes, address=name, model_name=name, engine=name)
    registered = await stub.Register(largest)
    full = dict.fromkeys(("free", "cached", "held", "reserved"), 1 << 24)
    counts = [common_pb2.BlockCounts(group=group, tier=common_pb2.TIER_DEVICE, **full) for group in range(100)]
    load = common_pb2.WorkerLoad(num_running=4096, num_waiting=1 << 20, num_uncomputed_tokens=1 << 31)
    session, key = registered.session, registered.session_key
    heartbeat = pb.KeepAliveRequest(session=session, session_key=key, load=load, counts=counts)
    assert heartbeat.ByteSize() < SMALL.num_bytes
    assert (await stub.KeepAlive(heartbeat)).lease_ms
    root = common_pb2.Root(model_fingerprint=FINGERPRINT, adapter=name, tenant_salt=name)
    longest = bytes(4 * limits.max_tokens_per_sequence)
    assert (await stub.Route(pb.RouteRequest(root=root, tokens=longest))).workers
    await stub.Drain(pb.DrainRequest(worker_id="w" * limits.max_id_bytes, grace_ms=1000))
    await stub.Describe(pb.DescribeRequest(worker_id="w" * limits.max_id_bytes, max_sequences=1000))
    await stub.Deregister(pb.DeregisterRequest(session=session, session_key=key))
