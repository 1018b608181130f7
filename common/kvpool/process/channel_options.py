"""Options of gRPC channels and servers, the two ends of a connection, which have to agree."""

from __future__ import annotations

from typing import Final

from kvpool.protocol.limits import MAX_MESSAGE_BYTES

PING_SECONDS: Final = 30.0
"""Silence after which either end pings the other; servers have a setting for it."""
PING_TIMEOUT_SECONDS: Final = 10.0
"""Time after which a peer that has not answered a ping is gone."""

MAX_PENDING_CALLS: Final = 1 << 16
"""Most calls that have arrived and wait for the server."""

_MESSAGE_SIZE: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_MESSAGE_SIZE,
    # gRPC backs off up to two minutes by default. A restarted service must be found at once: on a worker, streams live on their
    # reserve meanwhile.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
    # Also the time-out of one attempt to connect, despite its name: a frozen process still accepts, but never answers.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", round(PING_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", round(PING_TIMEOUT_SECONDS * 1000)),
    # A call that gRPC repeats on its own would be a second stream for one attempt, or a second message under one call_no.
    ("grpc.enable_retries", 0),
    # A proxy in the environment is for the web: it knows no local addresses, and must not see messages to them.
    ("grpc.enable_http_proxy", 0),
)
"""Options of a channel to a manager or a worker."""

SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_MESSAGE_SIZE,
    # Otherwise a second server on the port would share it, and callers would meet now one and now the other.
    ("grpc.so_reuseport", 0),
    # Peers may ping every 10 s without a call in flight; a second of slack, because too early a ping ends in GOAWAY.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 9_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Of the calls that wait, gRPC cancels some at random above 1,000 and all above 3,000, whoever made them: a peer that opens and
    # resets streams in haste would end the calls of good clients.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
)
"""Options of every server; its settings add more."""
