"""Explain says nothing of other salts: under one salt its answer is the same whatever the others hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import AllocateItem, BlockMissCause, Root, SequenceUpdate, Uplink
from kvpool.cache_service.core.other_roots import MAX_ROOTS
from tests.cache_service.core.lockstep import FINGERPRINT, key, registration, token_bytes
from tests.cache_service.core.test_core_past_mistakes import lines_of

OURS = Root(FINGERPRINT, tenant_salt="ours")
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]

tokens = st.lists(st.integers(1, 3), min_size=1, max_size=13)
roots = st.builds(
    lambda adapter, salt: Root(FINGERPRINT, adapter, salt), st.sampled_from(["", "a"]), st.sampled_from("xy")
)
requests = st.lists(st.tuples(roots, tokens, st.sampled_from(["computing", "freed"])), max_size=8)


class Office:
    """A manager with one worker whose pool is so large that nobody's prompts push out another's."""

    def __init__(self, *, num_blocks: int = 400, across_salts: bool = False) -> None:
        self.manager = CacheManager(1, explain_evictions=64, explain_across_salts=across_salts)
        self.number = self.manager.register(registration(num_blocks=num_blocks), 0.0).session
        self._call_no = 0
        self._num_served = 0

    def serve(self, root: Root, prompt: list[int], end: str = "freed") -> str:
        """One request; returns its sequence_id."""
        self._num_served += 1
        name = f"{root.tenant_salt}{self._num_served}"
        item = AllocateItem(key(name), root, token_bytes(prompt), no_wait=True)
        self.manager.allocate(Uplink(self.number, self._call_no + 1), [item])
        if end == "freed":
            update = SequenceUpdate(key(name), 0, b"", len(prompt), ())
            self.manager.free(Uplink(self.number, self._call_no + 2), [update])
        self._call_no += 2
        return name

    def explain(self, prompt: list[int]) -> Any:
        """What Explain says under our salt, without what differs between two managers."""
        found = self.manager.explain(OURS, token_bytes(prompt))
        return [(one.num_cached_tokens, one.miss._replace(other_worker=None)) for one in found.workers], found.closest


@settings(max_examples=150, deadline=None)
@given(st.lists(tokens, max_size=4), requests, requests, tokens)
def test_the_answer_under_one_salt_does_not_depend_on_what_the_others_hold(
    ours: list[list[int]], some: list[Any], others: list[Any], asked: list[int]
) -> None:
    answers = []
    for theirs in (some, others):
        office = Office()
        for request in theirs:
            office.serve(*request)
        for prompt in ours:
            office.serve(OURS, prompt)
        answers.append(office.explain(asked))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("is_evicted", [False, True])
def test_what_another_salt_has_was_never_seen(is_evicted: bool) -> None:
    office = Office(num_blocks=4)
    office.serve(Root(FINGERPRINT, tenant_salt="theirs"), PROMPT)
    if is_evicted:
        office.serve(OURS, [9, 9, 9, 9, 9, 9, 9, 9, 9])
    ((num_cached, miss),), closest = office.explain(PROMPT)
    assert (num_cached, miss.cause) == (0, BlockMissCause.NEVER_SEEN)
    assert closest is None or is_evicted


def test_another_salt_is_named_only_if_the_manager_may() -> None:
    office = Office(across_salts=True)
    office.serve(Root(FINGERPRINT, tenant_salt="theirs"), PROMPT)
    ((_, miss),), closest = office.explain(PROMPT)
    assert miss.cause is BlockMissCause.OTHER_ROOT
    assert miss.other_root.is_other_salt
    assert closest is None


def test_our_own_roots_are_named_first() -> None:
    office = Office(across_salts=True)
    office.serve(OURS._replace(adapter="a"), PROMPT)
    office.serve(Root(FINGERPRINT, tenant_salt="theirs"), PROMPT)
    ((_, miss),), _ = office.explain(PROMPT)
    assert not miss.other_root.is_other_salt


def test_an_eviction_names_no_sequence_of_another_salt() -> None:
    theirs = Root(FINGERPRINT, tenant_salt="theirs")
    for across_salts in (False, True):
        office = Office(num_blocks=4, across_salts=across_salts)
        office.serve(OURS, PROMPT)
        name = office.serve(theirs, [9, 9, 9, 9, 9, 9, 9, 9, 9])
        ((_, miss),), _ = office.explain(PROMPT)
        assert miss.cause is BlockMissCause.EVICTED
        assert miss.evicted.key == (key(name) if across_salts else None)


def test_the_roots_of_other_salts_cost_nothing() -> None:
    """Not even the time that it takes says how many there are."""
    costs = []
    for count in (1, MAX_ROOTS + 10):
        office = Office(num_blocks=3 * (MAX_ROOTS + 10))
        for index in range(count):
            office.serve(Root(FINGERPRINT, tenant_salt=f"theirs{index}"), PROMPT[:5])
        costs.append(lines_of(lambda: office.explain(PROMPT)))  # noqa: B023
    assert costs[0] == costs[1]


def test_the_index_of_salts_keeps_the_roots_and_no_others() -> None:
    office = Office(num_blocks=4)
    for index in range(20):
        office.serve(Root(FINGERPRINT, tenant_salt=str(index % 5), adapter=str(index % 2)), PROMPT)
    tree = office.manager._tree
    kept = [node for of_salt in tree._salts.values() for node in of_salt]
    assert sorted(map(id, kept)) == sorted(map(id, tree.roots()))
    assert all(tree._salts.values())
