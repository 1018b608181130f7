"""Counts calls, their durations and refusals at the manager's edge. /metrics reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from kvpool.process.histogram import Histogram
from kvpool.v1 import cache_pb2

from .core.refusal import Reason, Refusal

METHODS: Final = tuple(method.name for method in cache_pb2.DESCRIPTOR.services_by_name["CacheService"].methods)
CALL_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REPORT_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class EdgeCounts:
    """The counts since the process began."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        """Ended calls, by method and name of the status code."""
        self.num_under_way = 0
        """Calls in flight."""
        self.call_seconds = {method: Histogram(CALL_SECONDS) for method in METHODS}
        """Time from the parsed request until the answer is ready to be written, by method."""
        self.refusals: Counter[Reason] = Counter()
        """Refusals of whole calls and of items of a batch, by reason."""
        self.unread: Counter[str] = Counter()
        """Requests that were refused before they were parsed, by reason."""
        self.report_seconds = Histogram(REPORT_SECONDS)
        """Time from Register to the last part of the report."""

    def on_begun(self) -> None:
        """Count a call that has come in; `on_call` follows."""
        self.num_under_way += 1

    def on_call(self, method: str, code: str, seconds: float | None) -> None:
        """Count a call that was answered or given up. None: its answer is a stream, whose duration has no meaning."""
        self.num_under_way -= 1
        self.calls[method, code] += 1
        if seconds is not None:
            self.call_seconds[method].observe(seconds)

    def on_unread(self, method: str, reason: str) -> None:
        """Count a call that was refused before its request was parsed. `method` is "/package.Service/Method" of any service."""
        self.unread[reason] += 1
        name = method.rpartition("/")[2]
        if name in METHODS:
            self.calls[name, "INVALID_ARGUMENT"] += 1

    def on_outcomes(self, outcomes: Iterable[object]) -> None:
        """Count the refusals in an answered batch."""
        for outcome in outcomes:
            if isinstance(outcome, Refusal):
                self.refusals[outcome.reason] += 1
