"""A worker that is none: it registers, has a session of its own, and says in it what it likes."""

from __future__ import annotations

import itertools
import time
from typing import Any

import grpc
from google.protobuf.message import Message

from kvpool.v1 import cache_pb2, cache_pb2_grpc
from tests.hostile.arena import CALL_SECONDS, device_pool

FINGERPRINT = "stranger"
"""Of no model that anybody serves, so that no client is sent here."""


_numbers = itertools.count(1)


def registration(worker_id: str = "", *, num_blocks: int = 257, **fields: Any) -> cache_pb2.RegisterRequest:
    """A Register that is in order, apart from `fields`; under a name that nobody has if none is given."""
    request = cache_pb2.RegisterRequest(
        worker_id=worker_id or f"stranger-{next(_numbers)}",
        incarnation=time.time_ns(),
        register_no=1,
        address="127.0.0.1:1",
        model_name=FINGERPRINT,
        model_fingerprint=FINGERPRINT,
        kv_cache_config=device_pool(num_blocks),
        max_model_len=4096,
        engine=FINGERPRINT,
    )
    request.MergeFrom(cache_pb2.RegisterRequest(**fields))
    return request


class Stranger:
    """Its session, with the number of the next call. Whatever else Register answers, e.g. a key, leads its calls too."""

    def __init__(self, channel: grpc.aio.Channel, worker_id: str = "", **fields: Any) -> None:
        self.stub = cache_pb2_grpc.CacheServiceStub(channel)
        self._request = registration(worker_id, **fields)
        self.registered = cache_pb2.RegisterResponse()
        self.call_no = 0

    async def register(self) -> None:
        """A new session; the earlier one ends. Raises AioRpcError."""
        self.registered = await self.stub.Register(self._request, timeout=CALL_SECONDS)
        self._request.register_no += 1
        self._request.last_session = self.registered.session
        self._request.highest_epoch_seen = self.registered.epoch
        self.call_no = 0

    def next_call_no(self) -> int:
        """One more than the last."""
        self.call_no += 1
        return self.call_no

    def led(self, message: Message) -> Message:
        """The message with what Register has answered in the fields of the same names: session, and a key where there is one."""
        for field in message.DESCRIPTOR.fields:
            if field.name in self.registered.DESCRIPTOR.fields_by_name and field.name != "epoch":
                setattr(message, field.name, getattr(self.registered, field.name))
        return message

    def uplink(self, **fields: Any) -> cache_pb2.Uplink:
        """Of its next mutating call."""
        uplink = cache_pb2.Uplink(**{"call_no": self.next_call_no(), **fields})
        self.led(uplink)
        return uplink

    async def deregister(self) -> None:
        """Leave. Raises AioRpcError."""
        request = cache_pb2.DeregisterRequest()
        self.led(request)
        await self.stub.Deregister(request, timeout=CALL_SECONDS)
