"""Whatever arrives, the answer is a status of the table with a message that helps, and the manager's laws hold afterwards.

The fixtures check the laws at the end of every test.
"""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from kvpool.cache_service import status
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.server import ManagerServer
from kvpool.protocol.limits import MAX_MESSAGE_BYTES
from kvpool.protocol.status import MAX_TEXT_BYTES
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc, common_pb2
from tests.attacks.spoil import spoil
from tests.cache_service.edge.peer import ROOT, Worker, item, key, prompt, refused, registration, run, tokens, update
from tests.rich_status import CODES, detail, field_of, position_of, reason_of

Stub = cache_pb2_grpc.CacheServiceStub
HOST = common_pb2.TIER_HOST


async def test_what_a_later_version_brings_is_unimplemented(stub: Stub) -> None:
    unknown = registration()
    unknown.kv_cache_config.groups[0].ClearField("spec")
    found = await refused(stub.Register(unknown), "UNSUPPORTED")
    assert "got no spec" in found.message


@pytest.mark.parametrize(
    ("kind", "spec", "field"),
    [
        ("cross_attention", {"max_encoder_tokens": 0}, ".max_encoder_tokens"),
        ("cross_attention", {"max_encoder_tokens": 8}, ""),
        ("sliding_window", {"window_tokens": 0, "ring_blocks": 3}, ".window_tokens"),
        ("sliding_window", {"window_tokens": 1, "ring_blocks": 3}, ".window_tokens"),
        ("sliding_window", {"window_tokens": 8, "ring_blocks": 2}, ".ring_blocks"),
        ("state", {"grid_tokens": 0, "scratch_blocks": 2}, ".grid_tokens"),
        ("state", {"grid_tokens": 6, "scratch_blocks": 2}, ".grid_tokens"),
        ("state", {"grid_tokens": 1 << 21, "scratch_blocks": 2}, ".grid_tokens"),
        ("state", {"grid_tokens": 8, "scratch_blocks": 0}, ".scratch_blocks"),
    ],
)
async def test_a_group_that_cannot_be_is_named(stub: Stub, kind: str, spec: dict[str, int], field: str) -> None:
    """Cross attention needs the length of the longest input, and another group for the decoder's own KV. In blocks of four tokens
    the seven before a token are in two blocks, and the token itself is in a third. A grid is a multiple of the block size."""
    request = registration()
    request.kv_cache_config.groups[0].CopyFrom(common_pb2.KVCacheGroup(**{kind: spec}, bytes_per_block=64))  # type: ignore[arg-type]
    found = await refused(stub.Register(request), "BAD_FIELD")
    assert field_of(found) == f"kv_cache_config.groups[0].{kind}{field}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", None),
        ("root", None),
        ("key.sequence_id", ""),
        ("key.sequence_id", "s" * 129),
        ("key.attempt", 0),
        ("root.model_fingerprint", "another model" * 1000),
        ("root.adapter", "a" * 257),
        ("root.tenant_salt", "t" * 257),
        ("root.input_digest", b"short"),
        ("tokens", b""),
        ("tokens", b"\1\2\3\4\5"),
        ("tokens", bytes(4 * ((1 << 20) + 1))),
        ("max_new_tokens", (1 << 32) - 1),
    ],
)
async def test_a_malformed_item_spoils_only_itself(worker: Worker, field: str, value: object) -> None:
    bad = item("bad", prompt(5))
    spoil(bad, field, value)
    results = (await worker.allocate(item("a", prompt(5)), bad, item("c", prompt(5, first=50)))).results
    assert [result.status.code for result in results] == [0, code_pb2.INVALID_ARGUMENT, 0]
    assert (reason_of(results[1].status), field_of(results[1].status)) == (
        "BAD_FIELD",
        field.replace("max_new_tokens", "tokens"),
    )
    assert [result.WhichOneof("outcome") for result in results] == ["granted", None, "granted"]


def refusal_of(response: pb.AllocateResponse | pb.AppendResponse | pb.ForkResponse, reason: str) -> status_pb2.Status:
    (result,) = response.results
    assert (code_pb2.Code.Name(result.status.code), reason_of(result.status)) == (CODES[reason], reason), result.status
    assert result.status.message
    return result.status


async def test_no_blocks_says_when_to_ask_again(worker: Worker) -> None:
    await worker.allocate(item("a", prompt(40)))
    found = refusal_of(await worker.allocate(item("b", prompt(40, first=90))), "NO_BLOCKS")
    assert "needed 10 blocks" in found.message
    assert detail(found, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 100


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda update: update.ClearField("key"), "BAD_FIELD"),
        (lambda update: update.released.add(), "BAD_FIELD"),
        (lambda update: update.bound.append(run(3, [7], [])), "BAD_FIELD"),
        (lambda update: update.bound.add(group=1, tier=1), "BAD_FIELD"),
        (lambda update: update.bound.add(tier=HOST), "BAD_FIELD"),
        (lambda update: update.bound.add(tier=77), "BAD_FIELD"),
        (lambda update: setattr(update, "tokens", b"\1"), "BAD_FIELD"),
        (lambda update: setattr(update, "num_computed_tokens", 1 << 31), "BAD_FIELD"),
        (lambda update: setattr(update.key, "sequence_id", "who?"), "UNKNOWN_SEQUENCE"),
        (lambda update: setattr(update.key, "round", 1), "UNKNOWN_SEQUENCE"),
        (lambda update: setattr(update, "start", 1 << 31), "GAP"),
        (lambda update: setattr(update, "tokens", tokens(7)), "TOKENS_DIFFER"),
        (lambda update: update.bound.append(run(3, [9], [1])), "STALE_GENERATION"),
        (lambda update: update.bound.append(run(0, [1], [1])), "STALE_GENERATION"),
        (lambda update: update.bound.append(run(4_000_000_000, [4_000_000_000], [1])), "STALE_GENERATION"),
    ],
)
async def test_a_wrong_update_changes_nothing(
    worker: Worker, spoil: Callable[[pb.SequenceUpdate], object], reason: str
) -> None:
    await worker.allocate(item("a", prompt(9)))
    spoiled = update("a", 4)
    spoil(spoiled)
    before = (await worker.keep_alive()).downlink
    found = refusal_of(await worker.append(spoiled), reason)
    assert (await worker.keep_alive()).downlink == before
    if reason in ("GAP", "TOKENS_DIFFER"):
        assert position_of(found) == (9 if reason == "GAP" else 0)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda fork: fork.ClearField("parent"), "BAD_FIELD"),
        (lambda fork: fork.ClearField("update"), "BAD_FIELD"),
        (lambda fork: setattr(fork.update.key, "sequence_id", ""), "BAD_FIELD"),
        (lambda fork: setattr(fork.update.key, "attempt", 0), "BAD_FIELD"),
        (lambda fork: setattr(fork.parent, "sequence_id", "who?"), "UNKNOWN_SEQUENCE"),
        (lambda fork: fork.parent.CopyFrom(fork.update.key), "UNKNOWN_SEQUENCE"),
        (lambda fork: setattr(fork.parent, "round", 1), "UNKNOWN_SEQUENCE"),
        (lambda fork: setattr(fork, "num_shared_blocks", 2), "GAP"),
        (lambda fork: setattr(fork, "num_shared_blocks", 1 << 31), "GAP"),
        (lambda fork: setattr(fork.update, "start", 9), "GAP"),
        (lambda fork: setattr(fork.update, "start", 3), "TOKENS_DIFFER"),
        (lambda fork: setattr(fork.update, "num_computed_tokens", 9), "BAD_FIELD"),
        (lambda fork: fork.update.bound.append(run(1, [2], [1])), "STALE_GENERATION"),
        (lambda fork: fork.update.bound.append(run(0, [2], [1])), "STALE_GENERATION"),
    ],
)
async def test_a_wrong_fork_changes_nothing(
    server: ManagerServer, worker: Worker, spoil: Callable[[pb.ForkItem], object], reason: str
) -> None:
    """The parent has computed 6 tokens, and so one full block."""
    await worker.allocate(item("a", prompt(9)))
    await worker.append(update("a", 6))
    fork = pb.ForkItem(parent=key("a"), num_shared_blocks=1, update=update("c", start=4, tokens=prompt(2, first=4)))
    spoil(fork)
    before = (await worker.keep_alive()).downlink
    found = refusal_of(await worker.fork(fork), reason)
    assert (await worker.keep_alive()).downlink == before
    assert server.manager.check().violations == []
    if reason == "GAP":
        assert position_of(found) == 4


async def test_free_forgives_what_a_race_can_cause(worker: Worker) -> None:
    """Unknown, freed, superseded, with a gap, with other tokens, naming foreign blocks: all end the same way."""
    for _ in range(2):
        await worker.allocate(item("a", prompt(9)))
        wrong = update("a", start=99, tokens=tokens(5), bound=[run(0, [3, 4], [1, 1])])
        reply = await worker.free(wrong, wrong, update("never seen"))
        assert reply.downlink.counts[0].held == 0


async def test_free_refuses_a_malformed_call_whole(worker: Worker) -> None:
    await worker.allocate(item("a", prompt(9)))
    found = await refused(worker.free(update("a"), update("b", bound=[run(0, [1], [])])), "BAD_FIELD")
    assert field_of(found) == "items[1].update.bound[0]"
    assert (await worker.keep_alive()).downlink.counts[0].held == 3


async def test_a_malformed_uplink_refuses_the_call_whole(stub: Stub, worker: Worker) -> None:
    wishes = [pb.ReserveWish(tier=common_pb2.TIER_DEVICE)] * 2
    for uplink, field in (
        (None, "uplink"),
        (pb.Uplink(session=worker.session, reserve_wishes=wishes), "uplink.reserve_wishes"),
        (pb.Uplink(session=worker.session, reserve_wishes=[pb.ReserveWish()]), "uplink.reserve_wishes[0].tier"),
        (pb.Uplink(session=worker.session, returned=[run(0, [1, 2], [1])]), "uplink.returned[0]"),
    ):
        for call in (
            stub.Allocate(pb.AllocateRequest(uplink=uplink)),
            stub.Append(pb.AppendRequest(uplink=uplink)),
            stub.Fork(pb.ForkRequest(uplink=uplink)),
            stub.Free(pb.FreeRequest(uplink=uplink)),
        ):
            assert field_of(await refused(call, "BAD_FIELD")) == field
    empty = stub.Allocate(pb.AllocateRequest(uplink=pb.Uplink()))
    await refused(empty, "STALE_SESSION")


async def test_a_message_over_the_limit_is_refused_by_the_transport_and_costs_nothing(worker: Worker) -> None:
    """gRPC answers before us, so without an ErrorInfo: peers check the size before they send."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.allocate(item("a", bytes(MAX_MESSAGE_BYTES)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await worker.grant("a", prompt(9))


async def test_questions_that_cannot_be_answered_say_why(stub: Stub, worker: Worker) -> None:
    for bad in (b"", b"\1\2\3", bytes(4 * ((1 << 20) + 1))):
        found = await refused(stub.Route(pb.RouteRequest(root=ROOT, tokens=bad)), "BAD_FIELD")
        assert field_of(found) == "tokens"
    await stub.Register(registration("v", model_fingerprint="model-b", model_name="small"))
    found = await refused(stub.Route(pb.RouteRequest(tokens=tokens(1))), "BAD_FIELD")
    assert "small, tiny" in found.message
    found = await refused(stub.Describe(pb.DescribeRequest(include_blocks=True)), "BAD_FIELD")
    assert field_of(found) == "worker_id"
    found = await refused(stub.Describe(pb.DescribeRequest(worker_id="x")), "UNKNOWN_WORKER")
    assert "live are: v, w" in found.message
    past = pb.DescribeRequest(worker_id="w", include_blocks=True, first_block=4_000_000_000, max_blocks=4_000_000_000)
    assert not (await stub.Describe(past)).workers[0].blocks


async def test_a_long_name_in_a_message_is_clipped_to_what_headers_hold(stub: Stub) -> None:
    found = await refused(stub.Describe(pb.DescribeRequest(worker_id="ü" * 2_000)), "UNKNOWN_WORKER")
    assert len(found.message.encode()) <= MAX_TEXT_BYTES
    assert found.message.startswith("no live worker 'ü")
    assert found.message.endswith("live are: none")


async def test_a_bug_is_logged_and_answered_without_leaking_and_the_manager_lives_on(
    server: ManagerServer, stub: Stub, worker: Worker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode() -> None:
        raise ZeroDivisionError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr(server.manager, "begin_audit", explode)
        found = await refused(stub.Check(pb.CheckRequest()), "INTERNAL")
    assert "secret" not in str(found)
    assert (await worker.keep_alive()).lease_ms


def test_every_reason_has_its_row_in_the_published_table() -> None:
    """The table at the top of cache.proto and ours are the same: whoever adds a reason adds it to both."""
    codes = dict(CODES)
    assert codes.pop(status.INTERNAL) == "INTERNAL"
    assert codes.pop(status.STANDBY) == "UNAVAILABLE"
    assert codes.keys() == Reason.__members__.keys()
    for reason in Reason:
        found = status.of_refusal(Refusal(reason, "why", field="f", position=3))
        assert (reason_of(found), found.message) == (reason.value, "why")
        assert code_pb2.Code.Name(found.code) == codes[reason.value]
