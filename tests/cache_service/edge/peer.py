"""What the tests speak with: a worker that says exactly what it is told to, and readers of rich statuses."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Iterable
from typing import Any, Self

import grpc
import pytest
from google.rpc import status_pb2

from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc, common_pb2
from tests.rich_status import code_of, reason_of, status_of

BLOCK_SIZE = 4
FINGERPRINT = "model-a"
ROOT = common_pb2.Root(model_fingerprint=FINGERPRINT)


def tokens(*ids: int) -> bytes:
    """Token ids as they travel."""
    return struct.pack(f"<{len(ids)}I", *ids)


def prompt(num_tokens: int, first: int = 0) -> bytes:
    """num_tokens different tokens from `first` on."""
    return tokens(*range(first, first + num_tokens))


def key(sequence_id: str, attempt: int = 1, round: int = 0) -> common_pb2.SequenceKey:
    return common_pb2.SequenceKey(sequence_id=sequence_id, attempt=attempt, round=round)


def run(start_index: int, blocks: Iterable[int], generations: Iterable[int]) -> common_pb2.BlockRun:
    """Table entries, or a set of blocks."""
    return common_pb2.BlockRun(
        tier=common_pb2.TIER_DEVICE, start_index=start_index, block_ids=blocks, generations=generations
    )


def item(
    sequence_id: str, prompt_tokens: bytes, *, attempt: int = 1, max_new_tokens: int = 1, no_wait: bool = True
) -> pb.AllocateItem:
    """A sequence that wants a table."""
    return pb.AllocateItem(
        key=key(sequence_id, attempt),
        root=ROOT,
        tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        no_wait=no_wait,
    )


def update(sequence_id: str, num_computed_tokens: int = 0, **fields: Any) -> pb.SequenceUpdate:
    """What a worker says of a sequence's first attempt."""
    return pb.SequenceUpdate(key=key(sequence_id), num_computed_tokens=num_computed_tokens, **fields)


def registration(
    worker_id: str = "w", *, num_blocks: int = 17, register_no: int = 1, **fields: Any
) -> pb.RegisterRequest:
    """A worker's introduction that is all right, apart from `fields`; tests spoil it."""
    request = pb.RegisterRequest(
        worker_id=worker_id,
        incarnation=1,
        register_no=register_no,
        process_key=b"first",
        address="127.0.0.1:1",
        model_name="tiny",
        model_fingerprint=FINGERPRINT,
        kv_cache_config=common_pb2.KVCacheConfig(
            block_size=BLOCK_SIZE,
            groups=[common_pb2.KVCacheGroup(full_attention=common_pb2.FullAttentionSpec(), bytes_per_block=64)],
            pools=[common_pb2.KVCachePool(tier=common_pb2.TIER_DEVICE, num_blocks=num_blocks)],
        ),
        max_model_len=64,
        engine="test",
    )
    request.MergeFrom(pb.RegisterRequest(**fields))
    return request


class Worker:
    """A registered worker. It keeps the session and numbers its calls, and does nothing else by itself."""

    seconds: float | None = None
    """Within which a call must be answered, or it fails."""

    def __init__(self, stub: cache_pb2_grpc.CacheServiceStub, request: pb.RegisterRequest) -> None:
        self.stub = stub
        self.request = request
        self.registered = pb.RegisterResponse()
        self.call_no = 0
        self.downlink_ack = 0

    @classmethod
    async def begin(cls, stub: cache_pb2_grpc.CacheServiceStub, request: pb.RegisterRequest) -> Self:
        worker = cls(stub, request)
        await worker.register()
        return worker

    @property
    def session(self) -> int:
        return self.registered.session

    @property
    def session_key(self) -> bytes:
        return self.registered.session_key

    async def register(self) -> pb.RegisterResponse:
        self.registered = await self.stub.Register(self.request, timeout=self.seconds)
        self.request.register_no += 1
        self.request.highest_epoch_seen = self.registered.epoch
        self.request.last_session = self.registered.session
        self.call_no = self.downlink_ack = 0
        return self.registered

    def uplink(self, wish: int | None = None, returned: Iterable[common_pb2.BlockRun] = ()) -> pb.Uplink:
        self.call_no += 1
        wishes = [] if wish is None else [pb.ReserveWish(tier=common_pb2.TIER_DEVICE, num_blocks=wish)]
        return pb.Uplink(
            session=self.session,
            session_key=self.session_key,
            call_no=self.call_no,
            downlink_ack=self.downlink_ack,
            reserve_wishes=wishes,
            returned=returned,
        )

    async def allocate(self, *items: pb.AllocateItem, wish: int | None = None) -> pb.AllocateResponse:
        return await self.stub.Allocate(pb.AllocateRequest(uplink=self.uplink(wish), items=items))

    async def grant(self, sequence_id: str, prompt_tokens: bytes, **options: Any) -> pb.Granted:
        """The grant of a sequence, which must not be refused."""
        (result,) = (await self.allocate(item(sequence_id, prompt_tokens, **options))).results
        assert result.status.code == 0, result.status
        return result.granted

    async def append(
        self, *updates: pb.SequenceUpdate, want_blocks: int = 0, wish: int | None = None
    ) -> pb.AppendResponse:
        items = [pb.AppendItem(update=update, want_blocks=want_blocks) for update in updates]
        return await self.stub.Append(pb.AppendRequest(uplink=self.uplink(wish), items=items))

    async def free(self, *updates: pb.SequenceUpdate) -> pb.FreeResponse:
        items = [pb.FreeItem(update=update) for update in updates]
        return await self.stub.Free(pb.FreeRequest(uplink=self.uplink(), items=items))

    async def keep_alive(self, *, draining: bool = False) -> pb.KeepAliveResponse:
        request = pb.KeepAliveRequest(
            session=self.session,
            session_key=self.session_key,
            downlink_ack=self.downlink_ack,
            load=common_pb2.WorkerLoad(num_running=1, num_waiting=2),
            draining=draining,
        )
        return await self.stub.KeepAlive(request, timeout=self.seconds)

    async def fork(self, fork: pb.ForkItem) -> pb.ForkResponse:
        return await self.stub.Fork(pb.ForkRequest(uplink=self.uplink(), items=[fork]))

    async def deregister(self) -> pb.DeregisterResponse:
        request = pb.DeregisterRequest(session=self.session, session_key=self.session_key)
        return await self.stub.Deregister(request, timeout=self.seconds)


async def refused(call: Awaitable[object], reason: str) -> status_pb2.Status:
    """The rich status of a call that fails as a whole, which it must, for this reason and with its code."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status = status_of(caught.value)
    assert (caught.value.code(), reason_of(status)) == (code_of(reason), reason), caught.value
    return status
