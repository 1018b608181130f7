"""Where the time of a request goes."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.worker_service.codec import encode_usage
from kvpool.worker_service.engine.request_times import EngineTimes, RequestTimes
from kvpool.worker_service.engine.stream import RequestUsage


@pytest.mark.parametrize(
    ("events", "totals"),
    [
        pytest.param(
            [("token", 13), ("preempted", 40, 20), ("computed", 39, 24), ("computed", 41, 25), ("computed", 42, 26), ("token", 30)],
            EngineTimes(waiting=1.0, prefill=2.0, decode=12.0, preempted=5.0),
            id="until it is as far as before: a step that computes only a part of what was lost does not end it",
        ),
        pytest.param(
            [("preempted", 40, 12), ("computed", 40, 15), ("token", 16)],
            EngineTimes(waiting=1.0, prefill=2.0, decode=0.0, preempted=3.0),
            id="before the first token: no prefill",
        ),
        pytest.param(
            [("token", 12), ("preempted", 40, 20), ("computed", 8, 21), ("preempted", 8, 22), ("computed", 16, 23),
             ("computed", 40, 24), ("token", 30)],
            EngineTimes(waiting=1.0, prefill=1.0, decode=14.0, preempted=4.0),
            id="twice: the second time it has less to lose, and still needs what it had first",
        ),
        pytest.param(
            [("token", 12), ("preempted", 40, 12), ("computed", 40, 15)],
            EngineTimes(waiting=1.0, prefill=1.0, decode=0.0, preempted=0.0),
            id="after the last token: no part of the time, as the request ends before it has another one",
        ),
        pytest.param([], None, id="without a token there is nothing to say"),
    ],
)  # fmt: skip
def test_the_time_of_a_preemption_is_counted_once(events: list[Any], totals: EngineTimes | None) -> None:
    """It arrived at 10 s, and had blocks at 11."""
    times = RequestTimes()
    times.arrived_at, times.granted_at = 10.0, 11.0
    for what, *arguments in events:
        getattr(times, f"on_{what}")(*arguments)
    assert times.totals() == totals
    assert RequestTimes().totals() is None


def test_milliseconds_are_rounded_down() -> None:
    """So that their sum is at most the time that the request took."""
    message = encode_usage(RequestUsage(3, 0, 1, 0, times=EngineTimes(0.0019, 0.0029, 0.0039, 0.0049)))
    times = message.times
    assert (times.waiting_ms, times.prefill_ms, times.decode_ms, times.preempted_ms) == (1, 2, 3, 4)
    assert not encode_usage(RequestUsage(3, 0, 1, 0)).HasField("times")
