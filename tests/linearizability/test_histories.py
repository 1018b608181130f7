"""Recorded histories of the real server are linearizable; and the checker says so of no history that is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvpool.cache_service.core.messages import Appended, Granted, Wait
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
    """Hits, waits, entries that are asked for, fences, stale calls, lost answers: else the test above would be an empty one."""
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
    assert any(isinstance(one, Wait) and one.position for one in outcomes)
    assert any(isinstance(one, Appended) and one.num_sealed_tokens for one in outcomes)
    assert any(isinstance(one, Appended) and one.new_entries for one in outcomes)
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


def changed(history: list[Operation], op: Operation, **fields: Any) -> list[Operation]:
    return [dataclasses.replace(each, **fields) if each is op else each for each in history]


def told(history: list[Operation], method: str) -> list[Operation]:
    """The answered calls of a method, in the order of their answers."""
    found = [op for op in history if op.method == method and isinstance(op.answer, Told)]
    return sorted(found, key=lambda op: op.answered)


def assert_rejected(verdict: Verdict) -> None:
    assert verdict.order is None
    assert "would have been answered differently" in verdict.explanation


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


async def test_a_history_that_is_wrong_is_rejected(recorded: tuple[list[Operation], Specification]) -> None:
    """Each grant is of one sequence: two that change places fit into no order. An executed call cannot have been stale. The effects
    of a call that is left out are seen in others' answers. A call is answered as of its own time, and after it was executed."""
    history, start = recorded
    first, *_, last = told(history, "Allocate")
    granted = [op for op in told(history, "Allocate") if any(isinstance(one, Granted) for one in op.answer.outcomes)]  # type: ignore[union-attr]
    one, other = granted[0], next(op for op in granted if op.answer != granted[0].answer)
    wrong = [
        changed(changed(history, one, answer=other.answer), other, answer=one.answer),
        changed(history, first, answer=Refused("STALE_CALL")),
        [op for op in history if op is not first],
        changed(history, last, sent=-2, answered=-1),
    ]
    for method in ("KeepAlive", "Allocate", "Route"):
        early, late = others_in_between(history, method)
        wrong += [changed(history, early, answer=late.answer), changed(history, late, answer=early.answer)]
    for spoiled in wrong:
        assert_rejected(check(spoiled, start))
    assert check(changed(history, last, sent=-2), start).order is not None


async def test_a_lost_answer_may_mean_both(recorded: tuple[list[Operation], Specification]) -> None:
    """A call without an answer is placed where its effects are seen, and nowhere if that would change everything."""
    history, start = recorded
    executed = told(history, "Allocate")[0]
    assert check(changed(history, executed, answer=Unknown(), answered=NEVER), start).order is not None
    request = cache_pb2.DeregisterRequest(session=executed.request.uplink.session)
    at = executed.sent
    lost = Operation(len(history), "Deregister", request, at, NEVER, Unknown())
    assert check([*history, lost], start).order is not None
    heard = dataclasses.replace(lost, answer=Done(), answered=at)
    assert_rejected(check([*history, heard], start))


def overlaps(history: list[Operation]) -> int:
    ordered = sorted(history, key=lambda op: op.sent)
    return sum(later.sent < earlier.answered for index, earlier in enumerate(ordered) for later in ordered[index + 1 :])
