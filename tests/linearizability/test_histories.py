"""Recorded histories of the real server are linearizable; and the checker says so of no history that is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvpool.cache_service.core.messages import Appended, Granted
from kvpool.v1 import cache_pb2
from tests.linearizability.checker import Verdict, check
from tests.linearizability.history import NEVER, Done, Operation, Refused, Routed, Told, Unknown
from tests.linearizability.proxy import Weather
from tests.linearizability.specification import Specification
from tests.linearizability.workload import record

CALM = Weather(doubled=0.0, unanswered=0.0)


@pytest.mark.parametrize("seed", range(3))
async def test_a_recorded_history_has_an_order(tmp_path: Path, seed: int) -> None:
    """Calls of three workers and two clients, doubled, delayed, reordered and lost: one order explains every answer."""
    history, start = await record(tmp_path, seed, num_calls=25)
    verdict = check(history, start)
    assert verdict.order is not None, verdict.explanation
    assert overlaps(history) > len(history), "hardly any two calls were under way at the same time: nothing was tried"


async def test_histories_hold_what_is_worth_checking(tmp_path: Path) -> None:
    """Hits, waits, fences, stale calls and lost answers occur; else the test above would be an empty one."""
    history: list[Operation] = []
    refused: set[str] = set()
    for seed in range(20):  # what a history holds depends on the machine too; three are nearly always enough
        recorded, _ = await record(tmp_path / str(seed), seed, num_calls=40)
        history += recorded
        refused |= {op.answer.reason for op in recorded if isinstance(op.answer, Refused)}
        if seed >= 2 and {"STALE_CALL", "STALE_SESSION"} <= refused:
            break
    outcomes = [one for op in history if isinstance(op.answer, Told) for one in op.answer.outcomes]
    reasons = {one.reason for one in outcomes if isinstance(one, Refused)}
    assert any(isinstance(one, Granted) and one.num_cached_tokens for one in outcomes)
    assert any(isinstance(one, Appended) and one.num_sealed_tokens for one in outcomes)
    assert {"STALE_CALL", "STALE_SESSION"} <= refused
    assert {"STALE_ATTEMPT", "NO_BLOCKS"} <= reasons
    assert any(isinstance(op.answer, Routed) and any(cached for _, cached, _ in op.answer.workers) for op in history)
    assert any(isinstance(op.answer, Unknown) for op in history)


# -- histories that are wrong


@pytest.fixture
async def recorded(tmp_path: Path) -> tuple[list[Operation], Specification]:
    """A recorded history, told again as if each call had waited for the one before: with one order left, each change shows."""
    history, start = await record(tmp_path, 7, num_calls=20, weather=CALM)
    order = check(history, start).order
    assert order is not None
    in_a_row = [
        dataclasses.replace(op, number=place, sent=2 * place, answered=2 * place + 1) for place, op in enumerate(order)
    ]
    assert check(in_a_row, start).num_tried == len(in_a_row)
    return in_a_row, start


def with_answers(history: list[Operation], answers: dict[int, Any]) -> list[Operation]:
    """The history with other answers to some of its calls."""
    return [dataclasses.replace(op, answer=answers[op.number]) if op.number in answers else op for op in history]


def told(history: list[Operation], method: str) -> list[Operation]:
    """The answered calls of a method, in the order of their answers."""
    found = [op for op in history if op.method == method and isinstance(op.answer, Told)]
    return sorted(found, key=lambda op: op.answered)


def assert_rejected(verdict: Verdict) -> None:
    assert verdict.order is None
    assert "would have been answered differently" in verdict.explanation


async def test_swapped_answers_are_rejected(recorded: tuple[list[Operation], Specification]) -> None:
    """Each grant is somebody's own: two that change places fit into no order."""
    history, start = recorded
    granted = [op for op in told(history, "Allocate") if any(isinstance(one, Granted) for one in op.answer.outcomes)]  # type: ignore[union-attr]
    first, second = granted[0], next(op for op in granted if op.answer != granted[0].answer)
    assert_rejected(check(with_answers(history, {first.number: second.answer, second.number: first.answer}), start))


@pytest.mark.parametrize("method", ["KeepAlive", "Allocate", "Route"])
async def test_an_answer_out_of_another_time_is_rejected(
    recorded: tuple[list[Operation], Specification], method: str
) -> None:
    """A call that is answered as it would be later on; and one that is answered as it would have been before."""
    history, start = recorded
    early, late = others_in_between(history, method)
    assert_rejected(check(with_answers(history, {early.number: late.answer}), start))
    assert_rejected(check(with_answers(history, {late.number: early.answer}), start))


def others_in_between(history: list[Operation], method: str) -> tuple[Operation, Operation]:
    """Two calls of a method by the same peer that were answered differently."""

    def peer(op: Operation) -> object:
        if method == "Route":
            return op.request.tokens
        return op.request.session if method == "KeepAlive" else op.request.uplink.session

    answered = [op for op in history if op.method == method and not isinstance(op.answer, Refused)]
    return next(
        (early, late)
        for early in answered
        for late in answered
        if early.sent < late.sent and peer(early) == peer(late) and early.answer != late.answer
    )


async def test_the_effect_of_a_stale_call_is_rejected(recorded: tuple[list[Operation], Specification]) -> None:
    """A call that was executed, but is said to have been refused as stale."""
    history, start = recorded
    executed = told(history, "Allocate")[0]
    assert_rejected(check(with_answers(history, {executed.number: Refused("STALE_CALL")}), start))


async def test_a_call_left_out_is_missed(recorded: tuple[list[Operation], Specification]) -> None:
    """Its effects are seen in the answers of others."""
    history, start = recorded
    granted = told(history, "Allocate")[0]
    assert_rejected(check([op for op in history if op is not granted], start))


async def test_a_call_may_not_be_placed_outside_its_time(recorded: tuple[list[Operation], Specification]) -> None:
    """Answered before it was executed: rejected. Answered after that and sent before: one order is left, and found."""
    history, start = recorded
    late = told(history, "Allocate")[-1]
    too_early = dataclasses.replace(late, sent=-2, answered=-1)
    assert_rejected(check([too_early if op is late else op for op in history], start))
    long = dataclasses.replace(late, sent=-2)
    assert check([long if op is late else op for op in history], start).order is not None


async def test_a_lost_answer_may_mean_both(recorded: tuple[list[Operation], Specification]) -> None:
    """A call without an answer is placed where its effects are seen, and nowhere if that would change everything."""
    history, start = recorded
    executed = told(history, "Allocate")[0]
    forgotten = dataclasses.replace(executed, answer=Unknown(), answered=NEVER)
    assert check([forgotten if op is executed else op for op in history], start).order is not None
    request = cache_pb2.DeregisterRequest(session=executed.request.uplink.session)
    at = executed.sent
    lost = Operation(len(history), "Deregister", request, at, NEVER, Unknown())
    assert check([*history, lost], start).order is not None
    heard = dataclasses.replace(lost, answer=Done(), answered=at)
    assert_rejected(check([*history, heard], start))


def overlaps(history: list[Operation]) -> int:
    """Pairs of calls that were under way at the same time."""
    ordered = sorted(history, key=lambda op: op.sent)
    return sum(later.sent < earlier.answered for index, earlier in enumerate(ordered) for later in ordered[index + 1 :])
