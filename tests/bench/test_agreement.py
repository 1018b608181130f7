"""How far two engines agree."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import pytest

from bench.agreement import NUM_FIRST, Agreement, Answers, Listener
from kvpool.load.engine import Delivery, ServedRequest


class Counting:
    """An engine whose tokens count on from the prompt's last one. A prompt that begins with 1 fails after one token."""

    async def served(self) -> ServedRequest:
        return ServedRequest("counting", range(10), 100)

    async def generate(self, prompt: Sequence[int], num_tokens: int) -> AsyncGenerator[Delivery, None]:
        yield Delivery((), 0)
        for index in range(num_tokens):
            yield Delivery((prompt[-1] + 1 + index,), None)
            if prompt[0] == 1:
                raise ValueError("no such prompt")

    async def close(self) -> None: ...


async def test_a_listener_keeps_complete_answers_and_changes_nothing() -> None:
    listener = Listener(Counting())
    found = [delivery async for delivery in listener.generate((5, 7), 3)]
    assert found == [Delivery((), 0), Delivery((8,), None), Delivery((9,), None), Delivery((10,), None)]
    with pytest.raises(ValueError, match="no such prompt"):
        [delivery async for delivery in listener.generate((1, 7), 3)]
    assert listener.answers == {(5, 7): (8, 9, 10)}


def test_agreement_counts_prompts_that_both_answered_in_the_same_repetition() -> None:
    same = tuple(range(NUM_FIRST + 1))
    late = (*same[:-2], 99, 99)
    ours: list[Answers] = [{(1,): same, (2,): same, (3,): same}, {(1,): same}]
    theirs: list[Answers] = [{(1,): (*same[:-1], 99), (2,): late, (4,): same}, {(1,): (99, *same[1:])}]
    assert Agreement.of(ours, theirs) == Agreement(num_prompts=3, num_equal_at_first=2, num_equal_begins=1)
