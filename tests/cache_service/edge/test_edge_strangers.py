"""A peer without the key: it knows all that Describe shows, and changes nothing in a session that is not its own."""

from __future__ import annotations

import base64

import grpc
import pytest
from google.rpc import error_details_pb2
from structlog.testing import capture_logs

from kvpool.cache_service import worker_codec
from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.servicer import SESSION_KEY_BYTES
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests.attacks import at_manager
from tests.cache_service.core.lockstep import snapshot
from tests.cache_service.edge.peer import ROOT, Worker, prompt, refused, registration, run
from tests.cache_service.edge.victim import busy, seen, state_of
from tests.rich_status import detail, field_of
from tests.scrape import scrape

Stub = cache_pb2_grpc.CacheServiceStub
LARGEST = 2**64 - 1


@pytest.mark.parametrize("attack", at_manager.FOREIGN, ids=str)
@pytest.mark.parametrize("kind", ["none", "zeros", "one byte less", "one byte more", "one bit wrong"])
async def test_without_its_key_a_session_cannot_be_changed(
    server: ManagerServer, stub: Stub, channel: grpc.aio.Channel, worker: Worker, attack: at_manager.Attack, kind: str
) -> None:
    """test_edge_attacks.py has the key of the stranger's own session."""
    await busy(worker)
    right = worker.session_key
    wrong = {
        "none": b"",
        "zeros": bytes(SESSION_KEY_BYTES),
        "one byte less": right[:-1],
        "one byte more": right + b"\0",
        "one bit wrong": right[:-1] + bytes([right[-1] ^ 1]),
    }[kind]
    before = state_of(server)
    scene = at_manager.Scene(channel, await seen(stub), 0, wrong, registration("stranger"))
    await refused(attack.send(scene), attack.reason)
    assert state_of(server) == before


async def test_the_report_of_another_worker_cannot_be_told(server: ManagerServer, stub: Stub) -> None:
    """A stranger that gets in first would say what the worker's blocks hold."""
    worker = await Worker.begin(stub, registration(holds_state=True))
    contents = pb.ContentRun(root=ROOT, tokens=prompt(4), blocks=[run(0, [1], [1])])
    for number in (1, LARGEST):
        uplink = pb.Uplink(session=worker.session, call_no=number)
        lie = pb.ReportRequest(uplink=uplink, part=0, last=True, contents=[contents])
        await refused(stub.Report(lie), "WRONG_KEY")
    report = await stub.Report(pb.ReportRequest(uplink=worker.uplink(), part=0, last=True))
    assert (report.downlink.counts[0].free, report.downlink.counts[0].cached) == (16, 0)


async def test_a_session_that_has_ended_is_stale_whatever_the_key(stub: Stub, worker: Worker) -> None:
    """A worker that was fenced registers again, under another key; and Deregister is idempotent."""
    earlier, old_key = worker.session, worker.session_key
    keys = {(await worker.register()).session_key for _ in range(50)}
    assert len(keys | {old_key}) == 51
    assert {len(each) for each in keys} == {SESSION_KEY_BYTES} == {16}
    for session_key in (old_key, worker.session_key, b""):
        request = pb.KeepAliveRequest(session=earlier, session_key=session_key)
        await refused(stub.KeepAlive(request), "STALE_SESSION")
        await stub.Deregister(pb.DeregisterRequest(session=earlier, session_key=session_key))
    request = pb.KeepAliveRequest(session=worker.session, session_key=old_key)
    await refused(stub.KeepAlive(request), "WRONG_KEY")


async def test_a_key_is_never_shown(server: ManagerServer, stub: Stub) -> None:
    """Not in Describe, the metrics, a log line, a refusal or the text of an object."""
    worker = Worker(stub, registration())
    shown: list[bytes] = []
    with capture_logs() as lines:
        await worker.register()
        await busy(worker)
        shown.append((await stub.Describe(pb.DescribeRequest())).SerializeToString())
        shown.append((await seen(stub)).SerializeToString())
        shown.append((await worker.keep_alive()).SerializeToString())
        worker.call_no = 0
        for wrong in (worker.uplink(), pb.Uplink(session=worker.session)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Free(pb.FreeRequest(uplink=wrong))
            shown.append(repr((caught.value, caught.value.trailing_metadata())).encode())
        assert server.metrics is not None
        page = (await scrape(server.metrics.url)).text
        assert "kvpool_manager_sessions" in page
        shown.append(page.encode())
        session = server.manager.worker("w")
        uplink = worker_codec.decode_uplink(pb.FreeRequest(uplink=worker.uplink()))
        assert uplink.key == session.key == worker.session_key
        shown += [f"{thing!r} {thing}".encode() for thing in (session, vars(session), uplink, uplink.key)]
        await worker.deregister()
    assert [line["event"] for line in lines] == ["worker registered", "worker deregistered"]
    shown.append(repr(lines).encode())
    secret = worker.session_key
    forms = (secret, secret.hex().encode(), base64.b64encode(secret), repr(secret)[2:-1].encode())
    assert [form for form in forms for text in shown if form in text] == []


# -- the second line: numbers have bounds


async def test_the_furthest_call_no_that_is_taken(server: ManagerServer, stub: Stub, worker: Worker) -> None:
    """One further is refused even with the key, and uses up nothing."""
    await busy(worker)
    before = snapshot(server.manager)
    furthest = worker.call_no + (1 << 20)
    uplink = pb.Uplink(session=worker.session, session_key=worker.session_key, call_no=furthest + 1)
    status = await refused(stub.Append(pb.AppendRequest(uplink=uplink)), "BAD_FIELD")
    assert str(furthest) in status.message
    assert snapshot(server.manager) == before
    worker.call_no = furthest - 1
    assert (await worker.append()).downlink.counts


async def test_entries_that_were_never_sent_cannot_be_acknowledged(
    server: ManagerServer, stub: Stub, worker: Worker
) -> None:
    """Else the entries that come under those numbers would never be heard."""
    await busy(worker)
    before = snapshot(server.manager)
    worker.downlink_ack = 2
    assert field_of(await refused(worker.keep_alive(), "BAD_FIELD")) == "downlink_ack"
    assert field_of(await refused(worker.append(), "BAD_FIELD")) == "downlink_ack"
    assert snapshot(server.manager) == before
    worker.downlink_ack = 1
    assert not (await worker.keep_alive()).downlink.entries


async def test_a_register_no_cannot_be_used_up(stub: Stub, worker: Worker) -> None:
    """A stranger that knows the incarnation from Describe: the worker is told what to outgrow, and something is left above."""
    victim = await seen(stub)
    for register_no in (LARGEST, (1 << 63) + 1):
        request = registration(register_no=register_no, incarnation=victim.incarnation)
        assert field_of(await refused(stub.Register(request), "BAD_FIELD")) == "register_no"
    furthest = registration(register_no=1 << 63)
    await stub.Register(furthest)
    status = await refused(worker.register(), "STALE_REGISTER")
    known = int(detail(status, error_details_pb2.ErrorInfo).metadata["register_no"])
    assert known == 1 << 63
    worker.request.register_no = known + 1
    await worker.register()
    assert (await worker.keep_alive()).downlink.counts
    worker.request.register_no = known + 1 + (1 << 20) + 1
    assert field_of(await refused(worker.register(), "BAD_FIELD")) == "register_no"
