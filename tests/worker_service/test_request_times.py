"""Where the time of a request goes."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.v1 import worker_pb2
from kvpool.worker_service.engine.request_times import RequestTimes

Times = tuple[float, float, float, float]
"""Seconds that a request waited, was in prefill, decoded and was preempted."""


@pytest.mark.parametrize(
    ("events", "totals"),
    [
        pytest.param(
            [("token", 13), ("preempted", 40, 20), ("computed", 39, 24), ("computed", 41, 25), ("computed", 42, 26), ("token", 30)],
            (1.0, 2.0, 12.0, 5.0),
            id="until it is as far as before: a step that computes only a part of what was lost does not end it",
        ),
        pytest.param(
            [("preempted", 40, 12), ("computed", 40, 15), ("token", 16)],
            (1.0, 2.0, 0.0, 3.0),
            id="before the first token: no prefill",
        ),
        pytest.param(
            [("token", 12), ("preempted", 40, 20), ("computed", 8, 21), ("preempted", 8, 22), ("computed", 16, 23),
             ("computed", 40, 24), ("token", 30)],
            (1.0, 1.0, 14.0, 4.0),
            id="twice: the second time it has less to lose, and still needs what it had first",
        ),
        pytest.param(
            [("token", 12), ("preempted", 40, 12), ("computed", 40, 15)],
            (1.0, 1.0, 0.0, 0.0),
            id="after the last token: no part of the time, as the request ends before it has another one",
        ),
        pytest.param([], None, id="without a token there is nothing to say"),
    ],
)  # fmt: skip
def test_the_time_of_a_preemption_is_counted_once(events: list[Any], totals: Times | None) -> None:
    """It arrived at 10 s, and had blocks at 11."""
    times = RequestTimes()
    times.arrived_at, times.granted_at = 10.0, 11.0
    for what, *arguments in events:
        getattr(times, f"on_{what}")(*arguments)
    assert times.totals() == (None if totals is None else message(*totals))
    assert RequestTimes().totals() is None


def message(*seconds: float) -> worker_pb2.Times:
    waiting, prefill, decode, preempted = (int(1000 * each) for each in seconds)
    return worker_pb2.Times(waiting_ms=waiting, prefill_ms=prefill, decode_ms=decode, preempted_ms=preempted)


def test_milliseconds_are_rounded_down() -> None:
    """So that their sum is at most the time that the request took."""
    times = RequestTimes(arrived_at=0.0, granted_at=0.0019)
    times.on_token(0.0048)
    times.on_preempted(4, 0.005)
    times.on_computed(4, 0.0099)
    times.on_token(0.0136)
    assert times.totals() == message(0.001, 0.002, 0.003, 0.004)
