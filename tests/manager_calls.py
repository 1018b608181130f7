"""The manager's core as its servicer calls it: one protobuf request in, one response out, without gRPC."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from kvpool.cache_service import worker_codec
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.session_key import NO_KEY, SessionKey
from kvpool.v1 import cache_pb2


def execute(manager: CacheManager, method: str, request: Any, now: float, new_key: SessionKey = NO_KEY) -> Message:
    """What the manager answers; a session that begins has `new_key`. Raises Refusal."""
    if method == "Register":
        epoch, session = manager.register(worker_codec.decode_registration(request), now, new_key)
        return cache_pb2.RegisterResponse(
            epoch=epoch, session=session, report_wanted=request.holds_state, session_key=new_key
        )
    if method == "KeepAlive":
        load, key = worker_codec.decode_load(request.load), SessionKey(request.session_key)
        ack = request.answer_ack if request.HasField("answer_ack") else None
        reply = manager.keep_alive(
            request.session, request.downlink_ack, load, now, draining=request.draining, key=key, answer_ack=ack
        )
        return cache_pb2.KeepAliveResponse(downlink=worker_codec.encode_downlink(reply), number=reply.heartbeat_no)
    if method == "Deregister":
        manager.deregister(request.session, SessionKey(request.session_key))
        return cache_pb2.DeregisterResponse()
    uplink = worker_codec.decode_uplink(request)
    if method == "Report":
        _, reply = manager.report(uplink, worker_codec.decode_report(request))
        return cache_pb2.ReportResponse(downlink=worker_codec.encode_downlink(reply))
    if method == "Allocate":
        allocated, reply = manager.allocate(uplink, [worker_codec.decode_allocate_item(item) for item in request.items])
        results = map(worker_codec.encode_allocate_outcome, allocated)
        return cache_pb2.AllocateResponse(downlink=worker_codec.encode_downlink(reply), results=results)
    if method == "Append":
        appended, reply = manager.append(uplink, [worker_codec.decode_append_item(item) for item in request.items])
        answers = map(worker_codec.encode_append_outcome, appended)
        return cache_pb2.AppendResponse(downlink=worker_codec.encode_downlink(reply), results=answers)
    if method == "Fork":
        forked, reply = manager.fork(uplink, [worker_codec.decode_fork_item(item) for item in request.items])
        stated = map(worker_codec.encode_fork_outcome, forked)
        return cache_pb2.ForkResponse(downlink=worker_codec.encode_downlink(reply), results=stated)
    reply = manager.free(uplink, worker_codec.decode_free_items(request.items))
    return cache_pb2.FreeResponse(downlink=worker_codec.encode_downlink(reply))
