"""Limits the size of requests to each of the manager's methods, by the limits of the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvpool.process.request_guard import SMALL, RequestLimit
from kvpool.protocol.limits import MAX_MESSAGE_BYTES
from kvpool.v1 import cache_pb2

from .core.messages import TOKEN_BYTES, Limits

SERVICE: Final[str] = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name

_ROOM: Final = 64 << 10
"""Bytes for everything but tokens: names, roots, options."""

_LINK: Final = RequestLimit(MAX_MESSAGE_BYTES, "send fewer items, or a report in more parts")


def request_limits(limits: Limits) -> Mapping[str, RequestLimit]:
    """Return the limit of each method by its full name. A new method needs an entry here, or it gets the smallest limit."""
    route = RequestLimit(limits.max_tokens_per_sequence * TOKEN_BYTES + _ROOM, "send fewer tokens")
    by_name = {
        "Register": RequestLimit(_ROOM, "shorten the names, or list fewer groups and pools"),
        "Report": _LINK,
        "KeepAlive": SMALL,
        "Allocate": _LINK,
        "Append": _LINK,
        "Free": _LINK,
        "Fork": _LINK,
        "Deregister": SMALL,
        "Drain": SMALL,
        "Route": route,
        "Describe": SMALL,
        "DescribeBlock": SMALL,
        "Watch": SMALL,
        "Explain": route,
        "Check": SMALL,
    }
    return {f"/{SERVICE}/{name}": limit for name, limit in by_name.items()}
