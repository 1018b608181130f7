"""The manager's core as its servicer calls it: one protobuf request in, one response out, without gRPC."""

from __future__ import annotations

from typing import Any

from kvpool.cache_service import worker_codec
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.session_key import NO_KEY, SessionKey
from kvpool.v1 import cache_pb2
from kvpool.walkthrough import calls


def execute(manager: CacheManager, method: str, request: Any, now: float, new_key: SessionKey = NO_KEY) -> Any:
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
    if method == "Report":
        _, reply = manager.report(worker_codec.decode_uplink(request), worker_codec.decode_report(request))
        return cache_pb2.ReportResponse(downlink=worker_codec.encode_downlink(reply))
    return calls.execute(manager, request)
