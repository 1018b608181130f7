"""Explain over a real channel: each cause with its fields, and what is refused."""

from __future__ import annotations

from typing import Any

from kvpool.cache_service.core.messages import Root
from kvpool.cache_service.explain_codec import encode_explanation
from kvpool.cache_service.server import ManagerServer
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc, common_pb2
from tests.cache_service.edge.peer import (
    FINGERPRINT,
    ROOT,
    Worker,
    item,
    key,
    prompt,
    refused,
    registration,
    tokens,
    update,
)

Stub = cache_pb2_grpc.CacheServiceStub


async def explained(stub: Stub, prompt_tokens: bytes, worker_id: str = "w", root: common_pb2.Root = ROOT) -> Any:
    request = pb.ExplainRequest(root=root, tokens=prompt_tokens, worker_id=worker_id)
    (found,) = (await stub.Explain(request)).workers
    return found


async def serve(worker: Worker, name: str, prompt_tokens: bytes, root: common_pb2.Root = ROOT) -> int:
    wanted = item(name, prompt_tokens)
    wanted.root.CopyFrom(root)
    (result,) = (await worker.allocate(wanted)).results
    assert result.status.code == 0, result
    await worker.free(update(name, len(prompt_tokens) // 4))
    return result.granted.num_cached_tokens


async def test_what_is_promised_is_served(stub: Stub, worker: Worker) -> None:
    await serve(worker, "a", prompt(10))
    for asked in (prompt(10), prompt(9), prompt(8), prompt(12)):
        found = await explained(stub, asked)
        assert found.num_cached_tokens == await serve(worker, str(len(asked)), asked)
        assert found.miss.position == found.num_cached_tokens
        found = await explained(stub, asked)
        is_whole = len(asked) % 16 == 0
        assert found.miss.cause == (pb.MISS_CAUSE_LAST_TOKEN if is_whole else pb.MISS_CAUSE_PARTIAL_TAIL)


async def test_a_sequence_that_computes_the_prefix_is_named(stub: Stub, worker: Worker) -> None:
    await worker.allocate(item("a", prompt(10)))
    miss = (await explained(stub, prompt(10))).miss
    assert (miss.cause, miss.leader, miss.leader_position) == (pb.MISS_CAUSE_BEING_COMPUTED, key("a"), 8)
    other = await Worker.begin(stub, registration("v"))
    miss = (await explained(stub, prompt(10), "v")).miss
    assert (miss.cause, miss.other_worker_id) == (pb.MISS_CAUSE_BEING_COMPUTED, "w")
    await other.deregister()


async def test_an_eviction_is_reported_with_its_age_and_its_sequence(stub: Stub, worker: Worker) -> None:
    await serve(worker, "a", prompt(8))
    await serve(worker, "reason", prompt(61, first=100))
    await worker.keep_alive()
    miss = (await explained(stub, prompt(9))).miss
    assert (miss.cause, miss.evicted_for) == (pb.MISS_CAUSE_EVICTED, key("reason"))
    assert miss.evicted_ms_ago < 600_000


async def test_another_worker_and_another_root_are_named(stub: Stub, worker: Worker) -> None:
    await Worker.begin(stub, registration("v"))
    await serve(worker, "a", prompt(10))
    miss = (await explained(stub, prompt(10), "v")).miss
    assert (miss.cause, miss.other_worker_id) == (pb.MISS_CAUSE_ON_ANOTHER_WORKER, "w")
    adapted = common_pb2.Root(model_fingerprint=FINGERPRINT, adapter="law")
    miss = (await explained(stub, prompt(10), "v", adapted)).miss
    assert (miss.cause, miss.other_worker_id) == (pb.MISS_CAUSE_OTHER_ROOT, "w")
    assert (miss.other_root, miss.other_block_size, miss.other_salt) == (ROOT, 4, False)


async def test_whether_the_encoders_output_is_there_is_told(server: ManagerServer, worker: Worker) -> None:
    await worker.allocate(item("a", prompt(9)))
    found = server.manager.explain(Root(FINGERPRINT), prompt(9))
    for is_cached in (True, False):
        workers = [one._replace(encoder_cached=is_cached) for one in found.workers]
        (told,) = encode_explanation(found._replace(workers=workers), 1, 0.0).workers
        assert told.encoder_cached is is_cached


async def test_other_salts_are_not_spoken_of(server: ManagerServer, stub: Stub, worker: Worker) -> None:
    """Unless the manager was started with --explain-across-salts; the salt itself is not told even then."""
    salted = common_pb2.Root(model_fingerprint=FINGERPRINT, tenant_salt="secret")
    await serve(worker, "a", prompt(10), salted)
    answer = await stub.Explain(pb.ExplainRequest(root=ROOT, tokens=prompt(10)))
    assert answer.workers[0].miss == pb.Miss(cause=pb.MISS_CAUSE_NEVER_SEEN)
    assert not answer.HasField("closest")
    server.manager._explain_across_salts = True
    answer = await stub.Explain(pb.ExplainRequest(root=ROOT, tokens=prompt(10)))
    assert (answer.workers[0].miss.cause, answer.workers[0].miss.other_salt) == (pb.MISS_CAUSE_OTHER_ROOT, True)
    assert b"secret" not in answer.SerializeToString()


async def test_the_closest_prompt_names_the_token_where_they_part(stub: Stub, worker: Worker) -> None:
    document = list(range(100, 117))
    await serve(worker, "a", tokens(1, 2, 20, 4, *document))
    answer = await stub.Explain(pb.ExplainRequest(root=ROOT, tokens=tokens(1, 2, 0, 4, *document)))
    assert answer.num_workers == 1
    assert answer.epoch == worker.registered.epoch
    assert answer.closest == pb.ClosestPrompt(
        num_equal_tokens=2, prompt_token=0, cached_token=20, num_prompts=1, num_tokens_gained=20, num_different_tokens=1
    )


async def test_what_cannot_be_explained_is_refused(stub: Stub) -> None:
    """A prompt that no worker serves has no workers."""
    answer = await stub.Explain(pb.ExplainRequest(root=ROOT, tokens=prompt(4)))
    assert (len(answer.workers), answer.num_workers, answer.HasField("closest")) == (0, 0, False)
    for bad in (b"", b"abc"):
        await refused(stub.Explain(pb.ExplainRequest(root=ROOT, tokens=bad)), "BAD_FIELD")
    unknown = pb.ExplainRequest(root=ROOT, tokens=prompt(1), worker_id="x")
    await refused(stub.Explain(unknown), "UNKNOWN_WORKER")


async def test_a_route_that_asks_why_has_the_same_answer_with_it(stub: Stub, worker: Worker) -> None:
    """Without a second call; and nothing where nobody asks, or nobody serves."""
    await serve(worker, "a", prompt(10))
    request = pb.RouteRequest(root=ROOT, tokens=prompt(40), explain=True)
    routed = await stub.Route(request)
    assert routed.why == await stub.Explain(pb.ExplainRequest(root=ROOT, tokens=prompt(40)))
    assert routed.why.workers[0].num_cached_tokens == routed.workers[0].num_cached_tokens == 8
    request.explain = False
    assert not (await stub.Route(request)).HasField("why")
    nobody = common_pb2.Root(model_fingerprint="other")
    assert not (await stub.Route(pb.RouteRequest(root=nobody, tokens=prompt(4), explain=True))).HasField("why")
