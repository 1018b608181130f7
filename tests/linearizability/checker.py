"""Is there one order of the calls, consistent with time, in which a single owner would have given exactly these answers?

The algorithm is that of Wing and Gong ("Testing and Verifying Concurrent Objects", Journal of Parallel and Distributed Computing
17, 1993) with the memoisation of Lowe ("Testing for linearizability", Concurrency and Computation: Practice and Experience 29,
2017): next may be any call that was sent before the first answer among those not placed yet; a pair of (set of placed calls, state)
that has led to nothing is not tried again. A call without an answer may be placed anywhere after it was sent, or nowhere.

The history is not divided by session: that would be unsound, because sessions share the stamps of generations, and larger attempts
fence smaller ones on other workers. What makes the search short are the answers: each names generations, counts and downlink
entries, so that nearly always one call alone can be next. And a call that has no effect is placed as soon as it fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.linearizability.history import NEVER, Operation, Refused, Unknown
from tests.linearizability.specification import Specification


@dataclass
class Verdict:
    """Whether there is such an order."""

    order: list[Operation] | None
    """One, if there is."""
    num_tried: int
    """Calls executed by the model on the way."""
    explanation: str = ""
    """If there is none: how far one gets at best, and what could have come next but would have been answered differently."""


def check(history: list[Operation], start: Specification, *, max_tried: int = 1_000_000) -> Verdict:
    """Look for an order. Raises RuntimeError if `max_tried` executions of the model have not decided it."""
    operations = sorted(history, key=lambda operation: operation.sent)
    num_needed = sum(not isinstance(operation.answer, Unknown) for operation in operations)
    placed: list[tuple[int, Specification, list[int]]] = []
    """The order so far: what was placed, the state before it, and what else could be tried in its stead."""
    is_placed = [False] * len(operations)
    bits = 0
    num_answered = 0
    failed: set[tuple[int, bytes]] = set()
    state = start.copy()
    choices = _next(operations, is_placed)
    best: tuple[int, list[int], Specification, list[int]] = (0, [], state, list(choices))
    num_tried = 0
    while num_answered < num_needed:
        if not choices:
            if not placed:
                return Verdict(None, num_tried, _explain(operations, best))
            index, state, choices = placed.pop()
            is_placed[index] = False
            bits ^= 1 << index
            num_answered -= not isinstance(operations[index].answer, Unknown)
            continue
        index = choices.pop(0)
        operation = operations[index]
        is_unknown = isinstance(operation.answer, Unknown)
        num_tried += 1
        if num_tried > max_tried:
            raise RuntimeError(f"not decided after {max_tried} executions of the model: record a shorter history")
        after = _after(state, operation)
        if after is None:
            continue
        if operation.method == "Route" or isinstance(operation.answer, Refused):
            choices = []  # it has no effect wherever it is placed: if it fits here, nothing is won by placing it later
        key = bits | 1 << index, after.digest()
        if key in failed:
            continue
        failed.add(key)  # if it leads to the end, nobody will ask again
        placed.append((index, state, choices))
        is_placed[index] = True
        bits |= 1 << index
        num_answered += not is_unknown
        state = after
        choices = _next(operations, is_placed)
        if num_answered > best[0]:
            best = num_answered, [entry[0] for entry in placed], state, list(choices)
    return Verdict([operations[index] for index, _, _ in placed], num_tried)


def _after(state: Specification, operation: Operation) -> Specification | None:
    """The state behind a call; None if it would have been answered differently there, or is without answer and without effect."""
    refusal = state.refusal(operation)
    if isinstance(operation.answer, Unknown):
        if refusal is not None:
            return None
        after = state.copy()
        after.execute(operation)
        return None if after.digest() == state.digest() else after
    if refusal is not None:
        return state if refusal == operation.answer else None
    after = state if operation.method == "Route" else state.copy()
    return after if after.execute(operation) == operation.answer else None


def _next(operations: list[Operation], is_placed: list[bool]) -> list[int]:
    """What may be placed next: sent before any answer came to a call that is not placed. Those answered first come first."""
    first_answer = NEVER
    found: list[int] = []
    for index, operation in enumerate(operations):
        if is_placed[index]:
            continue
        if operation.sent > first_answer:
            break
        found.append(index)
        first_answer = min(first_answer, operation.answered)
    found = [index for index in found if operations[index].sent < first_answer]
    return sorted(found, key=lambda index: operations[index].answered)


def _explain(operations: list[Operation], best: tuple[int, list[int], Specification, list[int]]) -> str:
    num_answered, order, state, choices = best
    lines = [
        f"no order explains the answers; the longest that does holds {max(num_answered, 0)} answered calls, the last of them:"
    ]
    lines += [f"  {operations[index]}" for index in order[-5:]]
    lines.append("next could be, but would have been answered differently:")
    for index in choices:
        expected = state.copy().execute(operations[index])
        lines += [f"  {operations[index]}", f"    expected {expected}"]
    return "\n".join(lines)
