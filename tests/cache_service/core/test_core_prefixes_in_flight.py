"""Prefixes in flight: what a granted sequence is computing is waited for, not computed again, and nobody waits for nothing."""

from __future__ import annotations

import pytest

from kvpool.cache_service.core.messages import Granted, Wait
from kvpool.cache_service.core.refusal import Reason
from tests.cache_service.core.desk import Desk
from tests.cache_service.core.lockstep import Lockstep, key
from tests.cache_service.core.model import Refused

pytestmark = pytest.mark.usefixtures("every_hash")

PROMPT = list(range(40, 57))
"""Seventeen tokens: four full blocks and a tail."""


def sixteen(worker: Desk) -> list[Granted | Wait | Refused]:
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


def test_a_fenced_leader_is_waited_for_no_more() -> None:
    """The leader's successor lives elsewhere: it is going to stop, so the others are granted."""
    lockstep = Lockstep()
    worker, elsewhere = Desk(lockstep=lockstep), Desk(lockstep=lockstep, worker_id="w2")
    sixteen(worker)
    elsewhere.grant(key("s0", attempt=2), PROMPT)
    outcomes = worker.allocate_batch(*(worker.item(f"s{i}", PROMPT) for i in range(1, 4)))
    assert isinstance(outcomes[0], Granted)
    assert outcomes[1:] == [Wait(key("s1"), 16)] * 2


def test_nobody_waits_for_a_sequence_of_another_session() -> None:
    """KV of another worker is of no use: the same prompt on two workers has two leaders."""
    lockstep = Lockstep()
    one, two = Desk(lockstep=lockstep), Desk(lockstep=lockstep, worker_id="w2")
    assert isinstance(one.allocate("a", PROMPT), Granted)
    assert isinstance(two.allocate("b", PROMPT), Granted)
    assert two.allocate("c", PROMPT) == Wait(key("b"), 16)


def test_nobody_waits_for_another_attempt_of_itself() -> None:
    """A larger attempt on the same worker is granted at once: granting it fences the smaller one."""
    worker = Desk()
    worker.grant("s", PROMPT)
    assert isinstance(worker.allocate(key("s", attempt=2), PROMPT), Granted)
    assert worker.report("s") == Refused(Reason.STALE_ATTEMPT)
    assert worker.allocate("other", PROMPT) == Wait(key("s", attempt=2), 16)


def test_all_leaders_of_a_node_are_remembered() -> None:
    """Several were let in with no_wait: as each ends, those who ask again wait for the next oldest."""
    worker = Desk()
    for name in ("a", "b", "c"):
        worker.grant(name, PROMPT, no_wait=True)
    assert worker.allocate("x", PROMPT) == Wait(key("a"), 16)
    worker.free("a")
    assert worker.allocate("x", PROMPT) == Wait(key("b"), 16)
    worker.report("c", 8)
    assert worker.allocate("x", PROMPT) == Wait(key("b"), 16)
    worker.free("b")
    assert worker.allocate("x", PROMPT) == Wait(key("c"), 16)
    worker.free("c")
    assert worker.grant("x", PROMPT).num_cached_tokens == 8


def test_the_wait_is_for_the_leader_that_computes_most() -> None:
    """Of two leaders of the first missing block the one with the longer common prefix is named; of equals, the older."""
    worker = Desk()
    worker.grant("short", PROMPT[:9])
    worker.allocate("long", [*PROMPT[:13], 1], no_wait=True)
    worker.allocate("twin", [*PROMPT[:13], 2], no_wait=True)
    assert worker.allocate("x", PROMPT) == Wait(key("long"), 12)
    assert worker.allocate("y", PROMPT[:9]) == Wait(key("short"), 8)


def test_a_prompt_waits_only_for_what_it_can_use() -> None:
    """The last token is computed by everybody, and max_cached_tokens bounds what a sequence takes."""
    worker = Desk()
    worker.grant("leader", PROMPT)
    assert worker.allocate("same length", PROMPT[:16]) == Wait(key("leader"), 12)
    assert isinstance(worker.allocate("first block", PROMPT[:4]), Granted)
    assert isinstance(worker.allocate("takes nothing", PROMPT, max_cached_tokens=3), Granted)
    assert worker.allocate("takes one", PROMPT, max_cached_tokens=5) == Wait(key("leader"), 4)
