"""Prefixes in flight: what a granted sequence is computing is waited for, not computed again, and nobody waits for nothing."""

from __future__ import annotations

import pytest

from kvpool.cache_service.core.messages import Granted, Wait
from kvpool.cache_service.core.refusal import Reason, Refusal
from tests.cache_service.core.desk import Desk
from tests.cache_service.core.lockstep import key
from tests.cache_service.core.model import Refused

pytestmark = pytest.mark.usefixtures("every_hash")

PROMPT = list(range(40, 57))
"""Seventeen tokens: four full blocks and a tail."""


def sixteen(worker: Desk) -> list[Granted | Wait | Refusal]:
    """Sixteen equal prompts in one batch."""
    return worker.allocate_batch(*(worker.item(f"s{i}", PROMPT) for i in range(16)))


def test_sixteen_equal_prompts_have_one_leader() -> None:
    """The first is granted, fifteen wait for it, hold nothing, and share its blocks once they are sealed."""
    worker = Desk()
    outcomes = sixteen(worker)
    assert isinstance(outcomes[0], Granted)
    assert outcomes[1:] == [Wait(key("s0"), 16)] * 15
    assert worker.counts.held == 5
    worker.report("s0")
    outcomes = worker.allocate_batch(*(worker.item(f"s{i}", PROMPT) for i in range(1, 16)))
    assert all(isinstance(outcome, Granted) and outcome.num_cached_tokens == 16 for outcome in outcomes)
    assert worker.counts.held == 4 + 16
    assert worker.counts.shared == 4


def test_the_wait_is_for_the_leader_that_computes_most() -> None:
    """Of two leaders of the first missing block the one with the longer common prefix is named; of equals, the older."""
    worker = Desk()
    worker.grant("short", PROMPT[:9])
    worker.allocate("long", [*PROMPT[:13], 1], no_wait=True)
    worker.allocate("twin", [*PROMPT[:13], 2], no_wait=True)
    assert worker.allocate("x", PROMPT) == Wait(key("long"), 12)
    assert worker.allocate("y", PROMPT[:9]) == Wait(key("short"), 8)


def test_nobody_waits_for_another_attempt_of_itself() -> None:
    """A larger attempt on the same worker is granted at once: granting it fences the smaller one."""
    worker = Desk()
    worker.grant("s", PROMPT)
    assert isinstance(worker.allocate(key("s", attempt=2), PROMPT), Granted)
    assert worker.report("s") == Refused(Reason.STALE_ATTEMPT)
    assert worker.allocate("other", PROMPT) == Wait(key("s", attempt=2), 16)


def test_a_prompt_waits_only_for_what_it_can_use() -> None:
    """The last token is computed by everybody, and max_cached_tokens bounds what a sequence takes."""
    worker = Desk()
    worker.grant("leader", PROMPT)
    assert worker.allocate("same length", PROMPT[:16]) == Wait(key("leader"), 12)
    assert isinstance(worker.allocate("first block", PROMPT[:4]), Granted)
    assert isinstance(worker.allocate("takes nothing", PROMPT, max_cached_tokens=3), Granted)
    assert worker.allocate("takes one", PROMPT, max_cached_tokens=5) == Wait(key("leader"), 4)
