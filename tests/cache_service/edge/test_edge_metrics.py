"""The manager's /metrics: every number against traffic that is known."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from kvpool.cache_service.core.refusal import Reason
from kvpool.cache_service.counts import METHODS
from kvpool.cache_service.server import ManagerServer
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc, common_pb2
from tests.cache_service.edge.managers import Managers
from tests.cache_service.edge.peer import BLOCK_SIZE, ROOT, Worker, item, prompt, run, tokens, update
from tests.scrape import Scrape, num_listening_sockets, scrape
from tests.until import until

Stub = cache_pb2_grpc.CacheServiceStub


async def look(server: ManagerServer) -> Scrape:
    assert server.metrics is not None
    return await scrape(server.metrics.url)


def blocks(page: Scrape) -> dict[str, float]:
    return page.labelled("kvpool_manager_blocks", "state")


async def test_an_empty_manager_tells_its_epoch_and_zeroes(server: ManagerServer) -> None:
    page = await look(server)
    assert page.value("kvpool_manager_epoch") == server.manager.epoch
    assert page.labelled("kvpool_manager_sessions", "state") == {"serving": 0, "recovering": 0, "draining": 0}
    assert set(page.labelled("kvpool_manager_refusals_total", "reason").values()) == {0.0}
    reasons = {reason.value.lower() for reason in Reason} | {"malformed", "too_large"}
    assert page.labelled("kvpool_manager_refusals_total", "reason").keys() == reasons
    assert blocks(page) == {}
    # Of a counter that appears with 1 Prometheus knows no rate.
    calls = [page.value("kvpool_manager_calls_total", method=method, code="INTERNAL") for method in METHODS]
    assert calls == [0] * len(METHODS)
    assert page.families["kvpool_manager_refusals"].type == "counter"
    assert page.families["kvpool_manager_call_duration_seconds"].type == "histogram"


async def test_blocks_tokens_and_hits_are_those_of_the_pool(server: ManagerServer, worker: Worker) -> None:
    """Two blocks of "a" are sealed, "b" shares them, and one more is in the reserve. What is stated again is not counted again."""
    await worker.allocate(item("a", prompt(2 * BLOCK_SIZE + 1)))
    for _ in range(3):
        await worker.append(update("a", 2 * BLOCK_SIZE + 3, start=2 * BLOCK_SIZE + 1, tokens=tokens(7, 8, 9)))
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


async def test_calls_are_told_by_method_and_code_and_refusals_by_reason(
    server: ManagerServer, worker: Worker, stub: Stub
) -> None:
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


async def test_a_bug_and_a_call_given_up_are_told_by_their_codes(
    server: ManagerServer, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = server._servicer.counts

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(server.manager, "route", fail)
        patch.setattr(server._servicer.audits, "run", asyncio.Event().wait)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Route(pb.RouteRequest(tokens=prompt(1)))
        given_up = stub.Check(pb.CheckRequest())
        await until(lambda: counts.num_under_way)
        given_up.cancel()
        await until(lambda: not counts.num_under_way)
    page = await look(server)
    calls = "kvpool_manager_calls_total"
    assert page.value(calls, method="Route", code="INTERNAL") == 1
    assert page.value(calls, method="Check", code="CANCELLED") == 1


async def test_sessions_are_told_by_state_and_by_their_end(server: ManagerServer, worker: Worker) -> None:
    await worker.register()  # fences the session that the fixture has begun
    await worker.keep_alive(draining=True)
    page = await look(server)
    assert page.labelled("kvpool_manager_sessions", "state") == {"serving": 0, "recovering": 0, "draining": 1}
    assert page.labelled("kvpool_manager_requests", "state") == {"running": 1, "waiting": 2}
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
    content = pb.ContentRun(root=ROOT, tokens=prompt(2 * BLOCK_SIZE), blocks=[run(0, [1, 2], [1, 1])])
    idle = pb.IdleBlocks(tier=common_pb2.TIER_DEVICE, block_ids=[1, 2])
    await stub.Report(pb.ReportRequest(uplink=worker.uplink(), contents=[content], idle_blocks=[idle], last=True))
    await stub.Report(pb.ReportRequest(uplink=worker.uplink(), contents=[content], last=True))  # once more
    page = await look(server)
    assert page.value("kvpool_manager_reports_total") == 1
    assert page.value("kvpool_manager_report_duration_seconds_count") == 1
    assert page.value("kvpool_manager_reported_entries_total", case="cached") == 2
    assert blocks(page)["cached"] == 2


async def test_what_clients_send_never_becomes_a_label(server: ManagerServer, worker: Worker, stub: Stub) -> None:

    async def ask(name: str) -> None:
        root = common_pb2.Root(model_fingerprint=name, tenant_salt=name)
        await stub.Route(pb.RouteRequest(root=root, tokens=prompt(5)))
        await worker.allocate(item(name, prompt(1)))
        for call in (stub.Drain(pb.DrainRequest(worker_id=name)), stub.Describe(pb.DescribeRequest(worker_id=name))):
            with pytest.raises(grpc.aio.AioRpcError):
                await call

    await ask("first")
    before = (await look(server)).values.keys()
    for index in range(12):
        await ask(f"name-{index}")
    assert (await look(server)).values.keys() == before


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_process_has_a_page_only_if_it_is_asked_to_and_on_loopback(
    tmp_path: Path, managers: Managers, host: str
) -> None:
    """Of itself and of the manager; the metrics stay on loopback where the service does not."""
    arguments = ("--host", host, "--port", "0", "--state-dir", str(tmp_path))
    with managers.listening(*arguments) as (process, _):
        assert num_listening_sockets(process.pid) == 1
    with managers.listening(*arguments, "--metrics-port", "0") as (process, _):
        url = process.next_line("metrics")["url"]
        assert num_listening_sockets(process.pid) == 2
        assert url.startswith("http://127.0.0.1:")
        assert "metrics beyond loopback" not in process.log
        page = await scrape(url)
    assert page.value("process_resident_memory_bytes") > 1 << 20
    assert page.value("kvpool_manager_epoch") == 2
