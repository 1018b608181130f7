"""The counts of the gateway, and its page of metrics. Labels are routes, statuses and limits; none comes from a caller."""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvpool.process.histogram import Histogram
from kvpool.process.metrics import MetricsPage
from kvpool.process.version import installed_version

from .connection import ConnectionLimits

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class GatewayMetrics:
    """Counters of one gateway, since its start."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """Answered requests, by route and status."""
        self.request_seconds = Histogram(_SECONDS)
        """Time from a request's head to the last byte of its answer."""
        self.first_token_seconds = Histogram(_SECONDS)
        """Time from a request for text to its first token."""
        self.open_streams = 0
        """Answers that are being generated."""
        self.lost_readers = 0
        """Answers whose reader went away before their end."""
        self.sent_bytes = 0
        """Bytes of the bodies of answers."""

    def fill(self, page: MetricsPage, limits: ConnectionLimits, *, num_viewers: int) -> None:
        """Fill the page. `num_viewers` are browsers that follow the cluster."""
        page.gauge("kvpool_gateway_info", "Version of the process.", 1, version=installed_version())
        for (route, status), count in sorted(self.requests.items()):
            page.counter(
                "kvpool_gateway_requests", "Requests answered, by route.", count, route=route, status=str(status)
            )
        page.histogram(
            "kvpool_gateway_request_seconds",
            "From the head of a request to the end of its answer.",
            self.request_seconds,
        )
        page.histogram(
            "kvpool_gateway_first_token_seconds",
            "From a request for text to its first token.",
            self.first_token_seconds,
        )
        page.gauge("kvpool_gateway_open_streams", "Answers that are being generated.", self.open_streams)
        page.gauge("kvpool_gateway_viewers", "Browsers that follow the cluster.", num_viewers)
        page.counter(
            "kvpool_gateway_lost_readers", "Answers whose reader went away before their end.", self.lost_readers
        )
        page.counter("kvpool_gateway_sent_bytes", "Bytes of the bodies of answers.", self.sent_bytes)
        page.gauge("kvpool_gateway_connections", "Open connections.", limits.num_connections)
        page.gauge("kvpool_gateway_max_connections", "Connections that are served at most.", limits.max_connections)
        for limit, count in limits.ended.items():
            page.counter(
                "kvpool_gateway_connections_ended",
                "Connections closed because they reached a limit: idle, head, body, reader, full.",
                count,
                limit=limit,
            )
