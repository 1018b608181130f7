"""A simulated call with messages in both directions: their order, and what each end sees of the call's end, as with grpc.aio."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.simulation.echo import REFUSED, pair

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def _talk_in_bad_weather(seed: int) -> str:
    """Thirty requests, each sent while answers to earlier ones are on their way; returns the digest of the trace."""
    numbers = list(range(1, 31))
    with pair(seed) as case:
        weather = case.bus.weather
        weather.reorder_seconds, weather.delay, weather.delay_seconds = 0.3, 0.3, 3.0
        for number in numbers:
            case.send(number)
            case.kernel.step()
        case.send(None)
        case.until(lambda: case.end, seconds=200.0)
        assert case.end == "EOF"
        assert case.answers == numbers
        assert case.seen == [*numbers, "no more requests", "done"]
        case.settle()
        assert case.nothing_is_left()
        return case.kernel.digest()


def test_each_direction_keeps_its_order_and_the_end_of_the_requests_comes_last() -> None:
    """Also where messages by themselves would overtake each other. The same seed gives the same run."""
    assert _talk_in_bad_weather(4) == _talk_in_bad_weather(4)


def test_a_request_does_not_wait_for_an_answer_that_was_sent_before_it() -> None:
    """The directions are independent: an answer that is late holds up answers only."""
    with pair() as case:
        case.until(lambda: case.echo.calls)
        case.send(1)
        weather = case.bus.weather
        weather.delay, weather.delay_seconds = 1.0, 1000.0
        case.until(lambda: 1 in case.seen)
        weather.delay = 0.0
        at = case.kernel.now
        case.send(2)
        case.until(lambda: 2 in case.seen)
        assert case.kernel.now < at + 1.0
        assert not case.answers
        case.until(lambda: case.answers == [1, 2], seconds=2000.0)


@pytest.mark.parametrize("how", ["cancel", "cancelled read", "deadline", "failing iterator"])
def test_a_caller_that_ends_the_call_is_heard_by_the_server(how: str) -> None:
    """The reader of the requests sees their end, and after it the servicer's method is cancelled."""
    with pair(is_patient=True, timeout=2.0 if how == "deadline" else None) as case:
        case.send(1)
        case.until(lambda: case.answers)
        if how == "cancel":
            heard: list[bool] = []
            case.client.deliver(lambda: heard.extend([case.call.cancel(), case.call.cancel()]))
            assert heard == [True, False]
        elif how == "cancelled read":
            case.client.deliver(case.reading.cancel)
        elif how == "failing iterator":
            case.send(ValueError("the caller's mistake"))
            assert case.world.violation is not None
            assert "the caller's mistake" in case.world.violation.message
            case.world.violation = None
            case.client.loop.failures.clear()
        case.until(lambda: case.end and "done" in case.seen)
        assert case.seen == [1, "no more requests", "cancelled", "done"]
        if how == "deadline":
            assert case.code is grpc.StatusCode.DEADLINE_EXCEEDED
            case.send(2)  # grpc.aio takes one more from the iterator and stops there
        else:
            assert isinstance(case.end, asyncio.CancelledError)
            assert isinstance(case.iterator_end, ValueError if how == "failing iterator" else asyncio.CancelledError)
        case.settle()
        assert case.nothing_is_left()


def test_a_server_that_ends_the_call_with_a_status_takes_no_more_requests() -> None:
    """What it has answered before is read first. A reader of the requests that is still there has come too late."""
    with pair() as case:
        case.send(1, 2, REFUSED, 3)
        case.until(lambda: case.end)
        assert case.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert case.answers == [1, 2]
        case.send(4, 5)
        case.settle()
        assert 4 not in case.seen
        assert case.seen[-1] == "read too late"
        assert case.nothing_is_left()


def test_both_ends_hear_that_the_connection_has_broken() -> None:
    """What is on its way is lost, and what is sent later."""
    with pair(is_patient=True) as case:
        case.send(1)
        case.until(lambda: case.answers)
        case.call.break_off(case.kernel)
        case.send(2)
        case.until(lambda: case.end and "done" in case.seen)
        assert case.code is UNAVAILABLE
        assert case.seen == [1, "no more requests", "cancelled", "done"]
        case.send(3)
        case.settle()
        assert case.nothing_is_left()


def test_a_call_whose_opening_was_still_on_its_way_when_the_connection_broke_is_not_served() -> None:
    """Its server would wait for requests that nothing can bring."""
    with pair() as case:
        case.call.break_off(case.kernel)
        case.settle()
        assert case.code is UNAVAILABLE
        assert case.echo.calls == []


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_caller_hears_of_the_death_of_its_server(is_frozen: bool) -> None:
    """Also of a frozen one, which has accepted the call and not begun to serve it. The next process at the address hears none."""
    with pair() as case:
        if is_frozen:
            case.server.freeze()
        case.send(1)
        case.until(lambda: case.bus.open_calls[case.call] is case.server if is_frozen else case.answers)
        case.server.crash()
        case.server, echo = case.start_server()
        case.send(2)
        case.until(lambda: case.end)
        assert case.code is UNAVAILABLE
        case.settle()
        assert echo.calls == []
        case.send(3)
        assert case.nothing_is_left()


def test_a_server_whose_machine_lost_its_power_is_silent_until_it_is_back() -> None:
    """A request is sent to it again and again; the machine that is back knows no such connection."""
    with pair() as case:
        case.send(1)
        case.until(lambda: case.answers)
        case.server.crash(lost_power=True)
        case.send(2)
        at = case.kernel.now
        case.until(lambda: case.kernel.now > at + 5.0)
        assert case.end is None
        case.server, echo = case.start_server()
        case.until(lambda: case.end, seconds=5.0)
        assert case.code is UNAVAILABLE
        assert echo.calls == []


@pytest.mark.parametrize("which", ["server", "client"])
def test_a_peer_that_answers_no_pings_is_given_up(which: str) -> None:
    """A machine without power closes no connection, and none of the calls may stay for ever."""
    with pair(is_patient=True) as case:
        case.send(1)
        case.until(lambda: case.answers)
        (case.server if which == "server" else case.client).crash(lost_power=True)
        at = case.kernel.now
        case.until(lambda: case.end if which == "server" else "done" in case.seen, seconds=60.0)
        assert case.kernel.now > at + 30.0
        if which == "server":
            assert case.code is UNAVAILABLE
        else:
            assert case.seen == [1, "no more requests", "cancelled", "done"]


def test_the_server_hears_of_the_death_of_its_caller() -> None:
    """As of a cancellation."""
    with pair(is_patient=True) as case:
        case.send(1, 2)
        case.until(lambda: 2 in case.answers)
        case.client.crash()
        case.until(lambda: "done" in case.seen)
        assert case.seen == [1, 2, "no more requests", "cancelled", "done"]


def test_a_repeated_call_is_served_with_the_first_requests_and_answers_nothing() -> None:
    """Those that had come when it was repeated, and then no more."""
    with pair() as case:
        case.bus.weather.duplicate = 1.0
        case.send(1, 2)
        case.until(lambda: case.answers == [1, 2])
        case.bus.weather.duplicate = 0.0
        case.settle()
        case.send(3, None)
        case.until(lambda: case.end)
        assert case.answers == [1, 2, 3]
        first, *repeated = case.echo.calls
        assert first == [1, 2, 3, "no more requests", "done"]
        assert repeated == [[1, 2, "no more requests", "done"]] * 3  # the opening and two requests
        assert case.nothing_is_left()
