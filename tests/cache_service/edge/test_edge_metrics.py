"""The manager's /metrics: every number against traffic that is known."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import pytest

from kvpool.cache_service.core.refusal import Reason
from kvpool.cache_service.counts import METHODS
from kvpool.cache_service.server import ManagerServer
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc, common_pb2
from tests import http2
from tests.cache_service.edge.managers import Managers
from tests.cache_service.edge.peer import BLOCK_SIZE, Worker, item, key, prompt, registration, tokens
from tests.cache_service.edge.test_edge_attacks import until_rebuilt
from tests.scrape import Scrape, num_listening_sockets, scrape

Stub = cache_pb2_grpc.CacheServiceStub


async def look(server: ManagerServer) -> Scrape:
    assert server.metrics is not None
    return await scrape(server.metrics.url)


def blocks(page: Scrape) -> dict[str, float]:
    """Of the one worker, by state."""
    return page.labelled("kvpool_manager_blocks", "state")


def update(sequence_id: str, start: int, what: bytes, num_computed_tokens: int) -> pb.SequenceUpdate:
    return pb.SequenceUpdate(key=key(sequence_id), start=start, tokens=what, num_computed_tokens=num_computed_tokens)


async def test_an_empty_manager_tells_its_epoch_and_zeroes(server: ManagerServer) -> None:
    page = await look(server)
    assert page.value("kvpool_manager_epoch") == server.manager.epoch
    assert page.labelled("kvpool_manager_sessions", "state") == {"serving": 0, "recovering": 0, "draining": 0}
    assert set(page.labelled("kvpool_manager_refusals_total", "reason").values()) == {0.0}
    reasons = {reason.value.lower() for reason in Reason} | {"malformed", "too_large"}
    assert page.labelled("kvpool_manager_refusals_total", "reason").keys() == reasons
    assert blocks(page) == {}
    assert page.families["kvpool_manager_refusals"].type == "counter"
    assert page.families["kvpool_manager_call_duration_seconds"].type == "histogram"


async def test_blocks_tokens_and_hits_are_those_of_the_pool(server: ManagerServer, worker: Worker) -> None:
    """Two blocks of "a" are sealed, "b" shares them, and one more is in the reserve."""
    await worker.allocate(item("a", prompt(2 * BLOCK_SIZE + 1)))
    await worker.append(update("a", 2 * BLOCK_SIZE + 1, tokens(7, 8, 9), 2 * BLOCK_SIZE + 3))
    await worker.allocate(item("b", prompt(2 * BLOCK_SIZE + 2)), wish=1)
    page = await look(server)
    labels = {"worker": "w"}
    assert page.value("kvpool_manager_capacity_blocks", group="0", **labels) == 16
    assert blocks(page) == {"free": 16 - 4 - 1, "cached": 0, "held": 4, "reserved": 1, "withheld": 0}
    assert page.value("kvpool_manager_shared_blocks", group="0", **labels) == 2
    assert page.value("kvpool_manager_sequences", **labels) == 2
    assert page.value("kvpool_manager_prompt_tokens_total", **labels) == 4 * BLOCK_SIZE + 3
    assert page.value("kvpool_manager_cached_tokens_total", **labels) == 2 * BLOCK_SIZE
    assert page.value("kvpool_manager_generated_tokens_total", **labels) == 3
    assert page.value("kvpool_manager_prefix_nodes") == server.manager.num_prefix_nodes > 0
    assert 0 < page.value("kvpool_manager_lease_remaining_seconds", **labels) <= 600


async def test_said_again_a_token_is_not_counted_again(server: ManagerServer, worker: Worker) -> None:
    """An Append is a statement of state: the same one counts once."""
    await worker.allocate(item("a", prompt(BLOCK_SIZE)))
    for _ in range(3):
        await worker.append(update("a", BLOCK_SIZE, tokens(7), BLOCK_SIZE))
    assert (await look(server)).value("kvpool_manager_generated_tokens_total", worker="w") == 1


async def test_calls_are_told_by_method_and_code_and_refusals_by_reason(
    server: ManagerServer, worker: Worker, stub: Stub
) -> None:
    """One refusal of a whole call, one of an item of a batch that went well."""
    await stub.Describe(pb.DescribeRequest())
    await stub.Describe(pb.DescribeRequest())
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Describe(pb.DescribeRequest(worker_id="nobody"))
    answer = await worker.allocate(item("a", prompt(15 * BLOCK_SIZE)), item("b", prompt(15 * BLOCK_SIZE, first=1000)))
    assert len(answer.results) == 2
    page = await look(server)
    calls = "kvpool_manager_calls_total"
    assert page.value(calls, method="Describe", code="OK") == 2
    assert page.value(calls, method="Describe", code="NOT_FOUND") == 1
    assert page.value(calls, method="Register", code="OK") == 1
    assert page.value(calls, method="Allocate", code="OK") == 1
    refusals = page.labelled("kvpool_manager_refusals_total", "reason")
    assert {reason: count for reason, count in refusals.items() if count} == {"unknown_worker": 1, "no_blocks": 1}
    counts = page.labelled("kvpool_manager_call_duration_seconds_count", "method")
    assert counts.keys() == set(METHODS)
    assert {method: count for method, count in counts.items() if count} == {"Describe": 3, "Register": 1, "Allocate": 1}
    assert page.value("kvpool_manager_call_duration_seconds_sum", method="Describe") > 0


async def test_a_server_that_was_built_anew_is_counted(loop_of_grpcio: None, server: ManagerServer) -> None:
    name = "kvpool_manager_server_rebuilds_total"
    assert (await look(server)).value(name) == 0
    for number in (1, 2):
        async with await http2.Connection.open(server.port) as connection:
            await connection.request(b"/\xff")
            await until_rebuilt(server, number)
        assert (await look(server)).value(name) == number


async def test_bugs_are_counted_from_zero(server: ManagerServer) -> None:
    """Of a counter that appears with 1 Prometheus knows no rate."""
    page = await look(server)
    for method in METHODS:
        assert page.value("kvpool_manager_calls_total", method=method, code="INTERNAL") == 0


async def test_a_bug_and_a_call_given_up_are_told_by_their_codes(
    server: ManagerServer, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call is counted once, however it ends."""
    counts = server._servicer.counts

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(server.manager, "route", fail)
        patch.setattr(server._servicer.audits, "run", asyncio.Event().wait)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Route(pb.RouteRequest(tokens=prompt(1)))
        given_up = stub.Check(pb.CheckRequest())
        while not counts.num_under_way:
            await asyncio.sleep(0.001)
        given_up.cancel()
        while counts.num_under_way:
            await asyncio.sleep(0.001)
    page = await look(server)
    calls = "kvpool_manager_calls_total"
    assert page.value(calls, method="Route", code="INTERNAL") == 1
    assert page.value(calls, method="Check", code="CANCELLED") == 1


async def test_sessions_are_told_by_state_and_by_their_end(server: ManagerServer, worker: Worker, stub: Stub) -> None:
    await worker.register()  # fences the session that the fixture has begun
    beat = pb.KeepAliveRequest(
        session=worker.session,
        session_key=worker.session_key,
        load=common_pb2.WorkerLoad(num_running=3, num_waiting=2),
        draining=True,
    )
    await stub.KeepAlive(beat)
    page = await look(server)
    assert page.labelled("kvpool_manager_sessions", "state") == {"serving": 0, "recovering": 0, "draining": 1}
    assert page.labelled("kvpool_manager_requests", "state") == {"running": 3, "waiting": 2}
    await worker.deregister()
    await worker.register()
    server.manager.worker("w").lease_end = 0.0
    server.manager.tick(1.0)
    page = await look(server)
    ended = page.labelled("kvpool_manager_sessions_ended_total", "reason")
    never = dict.fromkeys(("bad_report", "over_budget", "reply_too_large", "epoch_raised"), 0)
    assert ended == {"fenced": 1, "deregistered": 1, "expired": 1, **never}
    assert blocks(page) == {}  # and nothing is told of a worker that is not there


async def test_reports_are_told_with_their_time_and_what_they_became(
    server: ManagerServer, worker: Worker, stub: Stub
) -> None:
    worker.request.holds_state = True
    await worker.register()
    assert (await look(server)).value("kvpool_manager_sessions", state="recovering") == 1
    root = common_pb2.Root(model_fingerprint=registration().model_fingerprint)
    run = common_pb2.BlockRun(tier=common_pb2.TIER_DEVICE, block_ids=[1, 2], generations=[1, 1])
    content = pb.ContentRun(root=root, tokens=prompt(2 * BLOCK_SIZE), blocks=[run])
    idle = pb.IdleBlocks(tier=common_pb2.TIER_DEVICE, block_ids=[1, 2])
    await stub.Report(pb.ReportRequest(uplink=worker.uplink(), contents=[content], idle_blocks=[idle], last=True))
    await stub.Report(pb.ReportRequest(uplink=worker.uplink(), contents=[content], last=True))  # once more
    page = await look(server)
    assert page.value("kvpool_manager_reports_total") == 1
    assert page.value("kvpool_manager_report_duration_seconds_count") == 1
    assert page.value("kvpool_manager_reported_entries_total", case="cached") == 2
    assert blocks(page)["cached"] == 2


async def test_audits_are_counted_with_what_they_find(server: ManagerServer, worker: Worker, stub: Stub) -> None:
    table = (await worker.allocate(item("a", prompt(9)))).results[0].granted.tables[0]
    await stub.Check(pb.CheckRequest())
    pool = server.manager.worker("w").pools[0]
    pool._ref_count[table.block_ids[1]] += 1
    found = len((await stub.Check(pb.CheckRequest())).violations)
    pool._ref_count[table.block_ids[1]] -= 1
    page = await look(server)
    assert page.value("kvpool_manager_audits_total") == 2
    assert page.value("kvpool_manager_violations_total") == found > 0


async def test_what_clients_send_never_becomes_a_label(server: ManagerServer, worker: Worker, stub: Stub) -> None:
    """However many names are asked for: the series are as many as before."""

    async def ask(name: str) -> None:
        root = common_pb2.Root(model_fingerprint=name, tenant_salt=name)
        await stub.Route(pb.RouteRequest(root=root, tokens=prompt(5)))
        await worker.allocate(item(name, prompt(1)))
        for call in (
            stub.Drain(pb.DrainRequest(worker_id=name)),
            stub.Describe(pb.DescribeRequest(worker_id=name)),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await call

    await ask("first")
    before = (await look(server)).values.keys()
    for index in range(12):
        await ask(f"name-{index}")
    assert (await look(server)).values.keys() == before


async def test_a_process_has_a_page_of_itself_and_the_manager_only_if_it_is_asked_to(
    tmp_path: Path, managers: Managers
) -> None:
    arguments = ("--port", "0", "--state-dir", str(tmp_path))
    with managers.listening(*arguments) as (process, _):
        assert num_listening_sockets(process.pid) == 1
    with managers.listening(*arguments, "--metrics-port", "0") as (process, _):
        line = process.stderr.readline()
        assert num_listening_sockets(process.pid) == 2
        url = line.partition('"url": "')[2].partition('"')[0]
        assert url.startswith("http://127.0.0.1:"), line
        page = await scrape(url)
    assert page.value("process_resident_memory_bytes") > 1 << 20
    assert page.value("kvpool_manager_epoch") == 2


def test_a_process_says_it_when_the_metrics_port_is_taken(tmp_path: Path, managers: Managers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, said = managers.fails("--port", "0", "--state-dir", str(tmp_path), "--metrics-port", port)
    assert status == 1
    assert f"127.0.0.1:{port}: " in said
    assert "--metrics-port" in said


def test_metrics_stay_on_loopback_where_the_service_does_not(tmp_path: Path, managers: Managers) -> None:
    with managers.listening(
        "--host", "0.0.0.0", "--port", "0", "--state-dir", str(tmp_path), "--metrics-port", "0"
    ) as (
        process,
        _,
    ):
        lines = [process.stderr.readline() for _ in range(2)]  # the warning, and the metrics
    assert "http://127.0.0.1:" in lines[1]
    assert "metrics beyond loopback" not in "".join(lines)
