"""Every RPC once over a real channel, as it is meant to be used."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvpool.cache_service import servicer
from kvpool.cache_service.request_sizes import SERVICE
from kvpool.cache_service.server import ManagerServer
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc, common_pb2
from tests.cache_service.edge.peer import ROOT, Worker, item, key, prompt, refused, registration, run, tokens, update
from tests.cache_service.edge.victim import seen
from tests.rich_status import reason_of
from tests.scrape import scrape

Stub = cache_pb2_grpc.CacheServiceStub


async def test_register_and_heartbeats_report_the_lease_and_describe_the_load(stub: Stub, worker: Worker) -> None:
    registered, answer = worker.registered, await worker.keep_alive()
    assert (registered.epoch, registered.keep_alive_interval_ms, registered.report_wanted) == (1, 100, False)
    assert registered.session >> 40 == registered.epoch
    assert registered.lease_ms == answer.lease_ms == 600_000
    assert answer.downlink.counts[0].free == 16
    described = await seen(stub)
    assert described.load.num_running == 1
    assert 590_000 < described.lease_remaining_ms <= 600_000


async def test_a_sequence_lives_from_allocate_to_free_and_its_blocks_serve_the_next(worker: Worker) -> None:
    reply = await worker.allocate(item("a", prompt(10), max_new_tokens=8), wish=2)
    (result,) = reply.results
    (table,) = result.granted.tables
    assert (result.status.code, len(table.block_ids), result.granted.num_cached_tokens) == (0, 3, 0)
    assert (table.group, table.tier, table.start_index) == (0, common_pb2.TIER_DEVICE, 0)
    (entry,) = reply.downlink.entries
    assert (entry.number, len(entry.grant.block_ids)) == (1, 2)
    worker.downlink_ack = entry.number
    (counts,) = reply.downlink.counts
    assert (counts.capacity, counts.free, counts.held, counts.reserved) == (16, 11, 3, 2)

    bound = run(3, entry.grant.block_ids[:1], entry.grant.generations[:1])
    stated = update("a", 13, start=10, tokens=prompt(3, first=10), bound=[bound])
    appended = await worker.append(stated)
    assert (appended.results[0].status.code, appended.results[0].num_sealed_tokens) == (0, 12)

    freed = await worker.free(stated)
    (counts,) = freed.downlink.counts
    assert (counts.cached, counts.held) == (3, 0)

    again = await worker.grant("b", prompt(12))
    assert again.num_cached_tokens == 8
    assert list(again.tables[0].block_ids[:2]) == list(table.block_ids[:2])
    assert list(again.tables[0].generations[:2]) == list(table.generations[:2])


async def test_max_cached_tokens_unset_means_all_and_zero_means_none(worker: Worker) -> None:
    await worker.allocate(item("a", prompt(9)))
    await worker.free(update("a", 9))
    none, some, all_ = item("n", prompt(9)), item("s", prompt(9)), item("l", prompt(9))
    none.max_cached_tokens, some.max_cached_tokens = 0, 7
    found = [result.granted.num_cached_tokens for result in (await worker.allocate(none, some, all_)).results]
    assert found == [0, 4, 8]


async def test_describe_shows_what_was_registered_and_what_happened(stub: Stub, worker: Worker) -> None:
    await worker.allocate(item("a", prompt(9)))
    await worker.append(update("a", 5))
    answer = await stub.Describe(pb.DescribeRequest(worker_id="w", include_blocks=True))
    (described,) = answer.workers
    assert described.kv_cache_config == registration().kv_cache_config
    assert (described.address, described.model_name, described.max_model_len) == ("127.0.0.1:1", "tiny", 64)
    assert (described.session, described.incarnation, described.num_sequences) == (worker.session, 1, 1)
    assert (described.totals.num_prompt_tokens, described.totals.num_calls) == (9, 2)
    assert (answer.epoch, answer.num_prefix_nodes) == (1, 2)
    sealed, filling, tail, *rest = described.blocks
    assert (sealed.block_id, sealed.state, sealed.sealed, sealed.token_count) == (1, pb.BLOCK_STATE_HELD, True, 4)
    assert sealed.block_hash != 0
    assert list(sealed.owners) == [key("a")]
    assert (filling.sealed, filling.token_count, filling.block_hash) == (False, 1, 0)
    assert (tail.table_index, tail.free_list_position) == (2, -1)
    assert [(block.state, block.free_list_position) for block in rest[:2]] == [(pb.BLOCK_STATE_FREE, i) for i in (0, 1)]
    page = await stub.Describe(pb.DescribeRequest(worker_id="w", include_blocks=True, first_block=5, max_blocks=3))
    assert [block.block_id for block in page.workers[0].blocks] == [5, 6, 7]


async def test_describe_shows_the_oldest_sequences_if_asked_for_them(stub: Stub, worker: Worker) -> None:
    """With what the manager knows of each: tokens stated since the grant, hits, computed tokens, blocks. A new round is new."""
    await worker.allocate(item("a", prompt(9)))
    stated = update("a", 10, start=9, tokens=tokens(100, 101))
    assert not (await worker.append(stated)).results[0].status.code
    await worker.allocate(item("b", prompt(13)), item("c", prompt(2, first=50), attempt=3))

    async def described(max_sequences: int) -> list[pb.SequenceDescription]:
        (found,) = (await stub.Describe(pb.DescribeRequest(max_sequences=max_sequences))).workers
        assert found.num_sequences == 3
        return list(found.sequences)

    assert await described(0) == []
    first, second, third = await described(4_000_000_000)
    assert first == pb.SequenceDescription(key=key("a"), num_tokens=11, num_computed_tokens=10, num_blocks=3)
    assert second == pb.SequenceDescription(
        key=key("b"), num_tokens=13, num_cached_tokens=8, num_computed_tokens=8, num_blocks=4
    )
    assert third == pb.SequenceDescription(key=key("c", attempt=3), num_tokens=2, num_blocks=1)
    assert await described(2) == [first, second]
    await worker.free(update("a"))
    again = item("a", prompt(9))
    again.key.round = 1
    await worker.allocate(again)
    assert (await described(9))[:2] == [second, third]


async def test_a_larger_attempt_on_another_worker_fences_the_smaller_until_it_is_freed(
    stub: Stub, worker: Worker
) -> None:
    other = await Worker.begin(stub, registration("v"))
    await worker.allocate(item("a", prompt(9)))
    elsewhere = (await other.allocate(item("a", prompt(9)))).results[0].status
    assert (elsewhere.code, reason_of(elsewhere)) == (6, "SEQUENCE_ELSEWHERE")
    await other.grant("a", prompt(9), attempt=2)
    (entry,) = (await worker.keep_alive()).downlink.entries
    assert entry.stop == key("a")
    assert reason_of((await worker.append(update("a"))).results[0].status) == "STALE_ATTEMPT"

    async def described() -> dict[str, list[tuple[int, bool]]]:
        workers = (await stub.Describe(pb.DescribeRequest(max_sequences=9))).workers
        return {found.worker_id: [(each.key.attempt, each.fenced) for each in found.sequences] for found in workers}

    assert await described() == {"w": [(1, True)], "v": [(2, False)]}
    assert (await worker.free(update("a"))).downlink.counts[0].held == 0
    assert await described() == {"w": [], "v": [(2, False)]}


async def test_the_sequences_of_an_answer_are_shared_evenly_by_its_workers(
    stub: Stub, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many workers there are, the answer takes the manager about as long; asked for alone, a worker has all of it."""
    monkeypatch.setattr(servicer, "MAX_SEQUENCES_PER_ANSWER", 5)
    other = await Worker.begin(stub, registration("v"))
    for each in (worker, other):
        for index in range(4):
            await each.allocate(item(f"{each.request.worker_id}{index}", prompt(2, first=10 * index)))

    async def described(worker_id: str = "") -> list[list[str]]:
        answer = await stub.Describe(pb.DescribeRequest(worker_id=worker_id, max_sequences=100))
        return [[each.key.sequence_id for each in found.sequences] for found in answer.workers]

    assert await described() == [["w0", "w1"], ["v0", "v1"]]
    assert await described("v") == [["v0", "v1", "v2", "v3"]]


async def test_route_ranks_the_holder_of_the_prefix_first_and_changes_nothing(stub: Stub, worker: Worker) -> None:
    await Worker.begin(stub, registration("v"))
    await worker.allocate(item("a", prompt(24)))
    await worker.free(update("a", 24))
    before = await seen(stub)
    request = pb.RouteRequest(root=ROOT, tokens=prompt(24))
    answer = await stub.Route(request)
    assert [routed.worker_id for routed in answer.workers] == ["w", "v"]
    assert (answer.workers[0].num_cached_tokens, answer.workers[0].address) == (20, "127.0.0.1:1")
    assert answer.explanation == ""
    request.max_workers = 1
    assert len((await stub.Route(request)).workers) == 1
    assert list((await seen(stub)).blocks) == list(before.blocks)


async def test_route_explains_why_no_worker_serves(stub: Stub) -> None:
    request = pb.RouteRequest(root=common_pb2.Root(model_fingerprint="other"), tokens=tokens(1))
    engine = registration("engine")
    engine.address = ""
    await Worker.begin(stub, engine)
    assert "no worker that serves text is registered" in (await stub.Route(request)).explanation
    await Worker.begin(stub, registration())
    explanation = (await stub.Route(request)).explanation
    assert "'other'" in explanation
    assert "'tiny' (model-a)" in explanation
    await Worker.begin(stub, registration(register_no=2, holds_state=True))
    for root in (ROOT, common_pb2.Root()):
        answer = await stub.Route(pb.RouteRequest(root=root, tokens=tokens(1)))
        assert not answer.workers
        assert "still reporting their blocks: w" in answer.explanation


async def test_check_counts_what_it_looked_at_and_names_what_is_broken(
    server: ManagerServer, stub: Stub, worker: Worker
) -> None:
    block = (await worker.grant("a", prompt(9))).tables[0].block_ids[1]
    audit = await stub.Check(pb.CheckRequest())
    counts = audit.num_blocks_checked, audit.num_sequences_checked, audit.num_nodes_checked, audit.num_sessions_checked
    assert counts == (16, 1, 2, 1)
    pool = server.manager.worker("w").pools[0]
    pool._ref_count[block] += 1
    found = (await stub.Check(pb.CheckRequest())).violations
    pool._ref_count[block] -= 1
    broken = next(violation for violation in found if violation.law == "references")
    assert (broken.worker_id, broken.session, broken.block_id) == ("w", worker.session, block)
    assert broken.sequence == key("a")
    assert server.metrics is not None
    page = await scrape(server.metrics.url)
    assert page.value("kvpool_manager_audits_total") == 2
    assert page.value("kvpool_manager_violations_total") == len(found)


async def test_deregister_is_idempotent_and_every_call_after_it_is_refused(stub: Stub, worker: Worker) -> None:
    for _ in range(2):
        await worker.deregister()
    assert not (await stub.Describe(pb.DescribeRequest())).workers
    for call in (worker.allocate(), worker.append(), worker.free(), worker.keep_alive()):
        assert "register again" in (await refused(call, "STALE_SESSION")).message


async def test_drain_tells_the_worker_once_and_routes_nobody_to_it(stub: Stub, worker: Worker) -> None:
    """Also while it says nothing of its own; a second order changes nothing; the order is repeated until acknowledged."""
    other = await Worker.begin(stub, registration("v"))
    for grace_ms in (1500, 9000):
        assert (await stub.Drain(pb.DrainRequest(worker_id="w", grace_ms=grace_ms))).session == worker.session
    request = pb.RouteRequest(root=ROOT, tokens=prompt(4))
    assert [routed.worker_id for routed in (await stub.Route(request)).workers] == ["v"]
    for reply in (await worker.keep_alive(), await worker.allocate()):
        (entry,) = reply.downlink.entries
        assert (entry.number, entry.drain.grace_ms) == (1, 1500)
    worker.downlink_ack = 1
    assert not (await worker.keep_alive()).downlink.entries
    described = {w.worker_id: w.draining for w in (await stub.Describe(pb.DescribeRequest())).workers}
    assert described == {"w": True, "v": False}
    await worker.grant("a", prompt(4))  # what it has taken on it may finish
    await stub.Drain(pb.DrainRequest(worker_id="v"))
    (entry,) = (await other.keep_alive()).downlink.entries
    assert not entry.drain.HasField("grace_ms")
    answer = await stub.Route(request)
    assert not answer.workers
    assert "are leaving: v, w" in answer.explanation


async def test_an_order_to_drain_outlives_the_session_but_not_the_process(stub: Stub, worker: Worker) -> None:
    """A worker that registers again before it has heard of the order is told in its new session; its successor is not."""
    await stub.Drain(pb.DrainRequest(worker_id="w", grace_ms=1500))
    await worker.register()
    (entry,) = (await worker.keep_alive()).downlink.entries
    assert entry.drain.grace_ms == 1500
    worker.request.incarnation += 1
    worker.request.predecessor_key = worker.request.process_key
    worker.request.process_key = b"successor"
    await worker.register()
    assert not (await worker.keep_alive()).downlink.entries
    request = pb.RouteRequest(root=ROOT, tokens=prompt(4))
    assert (await stub.Route(request)).workers


async def test_a_worker_that_says_it_drains_is_routed_to_no_more(stub: Stub, worker: Worker) -> None:
    """By its heartbeat; an older heartbeat that arrives late does not take that back, a new session does."""
    request = pb.RouteRequest(root=ROOT, tokens=prompt(4))
    assert (await stub.Route(request)).workers
    for draining in (True, False):
        assert not (await worker.keep_alive(draining=draining)).downlink.entries
        assert not (await stub.Route(request)).workers
    await worker.register()
    assert (await stub.Route(request)).workers


async def test_drain_refuses_what_makes_no_sense(stub: Stub, worker: Worker) -> None:
    unknown = await refused(stub.Drain(pb.DrainRequest(worker_id="x")), "UNKNOWN_WORKER")
    assert "live are: w" in unknown.message
    too_long = pb.DrainRequest(worker_id="w", grace_ms=3_600_001)
    await refused(stub.Drain(too_long), "BAD_FIELD")
    assert not (await worker.keep_alive()).downlink.entries


async def test_a_fork_shares_what_its_parent_has_computed(stub: Stub, worker: Worker) -> None:
    """Also what is stated twice is done once; and the blocks that both have stay when one of them is freed."""
    granted = (await worker.allocate(item("a", prompt(10)), wish=2)).results[0].granted
    (reserve,) = [entry.grant for entry in (await worker.keep_alive()).downlink.entries]
    await worker.append(update("a", 10))
    bound = run(2, reserve.block_ids[:1], reserve.generations[:1])
    forked = update("c", 8, start=8, tokens=prompt(3, first=8), bound=[bound])
    for _ in range(2):
        response = await worker.fork(pb.ForkItem(parent=key("a"), num_shared_blocks=2, update=forked))
        assert [(result.status.code, result.num_sealed_tokens) for result in response.results] == [(0, 8)]
        counts = response.downlink.counts[0]
        assert (counts.held, counts.shared, counts.reserved) == (4, 2, 2)
    await worker.free(update("a"))
    owners = {block.block_id: [owner.sequence_id for owner in block.owners] for block in (await seen(stub)).blocks}
    table = [*granted.tables[0].block_ids[:2], reserve.block_ids[0]]
    assert [owners[block] for block in table] == [["c"]] * 3


async def test_health_answers_for_the_server_and_the_service_until_it_stops(
    server: ManagerServer, channel: grpc.aio.Channel
) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    await server.stop()
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_reflection_lists_the_services(server: ManagerServer, channel: grpc.aio.Channel) -> None:
    stub_type: Any = reflection_pb2_grpc.ServerReflectionStub  # its types know no aio
    reflection = stub_type(channel)
    call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    async for answer in call:
        names = {service.name for service in answer.list_services_response.service}
        assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
