"""A status says the same after its way over the wire, fits into headers, and is believed only where it is one of ours."""

from __future__ import annotations

import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.status import of_refusal
from kvpool.process.channel_options import CHANNEL_OPTIONS, SERVER_OPTIONS
from kvpool.protocol.status import MAX_TEXT_BYTES, Details, build_status, read_details, reason_of
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.status import of_error


def test_what_is_built_is_read() -> None:
    built = build_status(
        code_pb2.ABORTED,
        "GAP",
        "why",
        metadata={"position": "12"},
        retry_seconds=0.25,
        quota="blocks",
        bad_field="tokens",
    )
    found = read_details(status_pb2.Status.FromString(built.SerializeToString()))
    assert found == Details("GAP", {"position": "12"}, 0.25, ("blocks: why", "tokens: why"))
    assert (found.number("position"), found.number("start"), Details("", {"n": "-1"}).number("n")) == (12, None, None)
    assert read_details(build_status(code_pb2.ABORTED, "GAP", "why")) == Details("GAP")


@pytest.mark.parametrize(
    "status",
    [
        of_refusal(Refusal(Reason.BAD_FIELD, "ü" * 2_000, field="tokens")),
        of_error(EngineError(ErrorKind.INVALID, "ü" * 2_000, field="stop")),
    ],
    ids=["manager", "worker"],
)
def test_a_long_message_is_clipped_to_what_headers_hold(status: status_pb2.Status) -> None:
    (violation,) = read_details(status).violations
    assert len(status.message.encode()) <= MAX_TEXT_BYTES
    assert " … " in status.message
    assert violation.endswith(status.message)


def test_details_that_are_none_of_ours_are_left_out() -> None:
    status = status_pb2.Status(code=code_pb2.NOT_FOUND)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="NO_BLOCKS", domain="example.com"))
    status.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff")
    status.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff")
    assert read_details(status) == Details()
    assert reason_of(status) == ""


def test_callers_ping_no_more_often_than_servers_allow() -> None:
    """Too early a ping ends the connection: GOAWAY, too_many_pings."""
    allowed = dict(SERVER_OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"]
    assert dict(CHANNEL_OPTIONS)["grpc.keepalive_time_ms"] > allowed
