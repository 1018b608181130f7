"""Groups with a sliding window: scratch that only the worker knows, windows that are named at boundaries, and hits with holes.

Drawn histories (test_core_state_machine.py) have such groups, and a model says what is right. Here is an example of the main rules,
what a refusal says, and what histories seldom reach.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.cache_service.core.budget import Account, Budget
from kvpool.cache_service.core.copies import Holder
from kvpool.cache_service.core.groups import make_groups
from kvpool.cache_service.core.groups.dense import DenseSpec
from kvpool.cache_service.core.groups.window import WindowSpec
from kvpool.cache_service.core.hashing import xxh64
from kvpool.cache_service.core.hits import cached_along, hits_in
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    Boundary,
    Granted,
    Layout,
    Limits,
    MissCause,
    Wait,
)
from kvpool.cache_service.core.prefix_tree import Node, PrefixTree
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.core.session import Session
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import Lockstep, key, refused, registration, token_bytes

SIZE = 4
WINDOW, SPAN, RING = 6, 2, 4
"""Tokens; the blocks that a hit needs; scratch blocks of a sequence, one more than must be."""


def worker_with_window(
    num_blocks: tuple[int, int] = (33, 33), *, limits: Limits | None = None, lockstep: Lockstep | None = None
) -> Desk:
    """Group 0 sees everything, group 1 the last six tokens."""
    return Desk(num_blocks, SIZE, windows=[(0, 0), (WINDOW, RING)], limits=limits, lockstep=lockstep)


def granted_by(desk: Desk, name: str, tokens: Any, **wanted: Any) -> Granted:
    outcome = desk.allocate(name, tokens, **wanted)
    assert isinstance(outcome, Granted), outcome
    return outcome


def served_until(desk: Desk, name: str, tokens: Any, *boundaries: int) -> None:
    """A request that names its windows at these boundaries, in blocks, and ends."""
    granted_by(desk, name, tokens, no_wait=True)
    for boundary in boundaries:
        desk.name(name, boundary)
    desk.free(name, len(list(tokens)))


# -- hits


def test_a_hit_needs_the_whole_prefix_in_full_groups_and_the_last_window_in_the_others() -> None:
    """The prompt of five blocks was computed; only the window before block 4 was named: a hit is 4 blocks long, or none."""
    desk = worker_with_window()
    served_until(desk, "a", range(20), 4)
    longer = granted_by(desk, "b", [*range(20), 99])
    full, window = longer.tables
    assert longer.num_cached_tokens == 16
    assert full.blocks[:4] == (1, 2, 3, 4)
    assert (window.start, len(window.blocks), len(window.scratch)) == (2, SPAN, 2)
    assert granted_by(desk, "c", [*range(12), 99, 99]).num_cached_tokens == 0, "no window ends after three blocks"


class _Looked:
    """What look-ups know of a session; `spans`: by group, blocks of a window, 0 for none."""

    def __init__(self, spans: tuple[int, ...]) -> None:
        windows = [(span and span * SIZE + 1, span and span + 1) for span in spans]
        introduction = registration(num_blocks=(9,) * len(spans), block_size=SIZE, windows=windows)
        self.by_slot = make_groups(introduction, PrefixTree(xxh64), Account(Budget(99, 999), SIZE))
        self.holder = self.by_slot[0].pool.holder
        self.whole = tuple(group for group in self.by_slot if group.is_whole)
        self.partial = self.dependents = tuple(group for group in self.by_slot if group.is_dependent)


def _path(held: list[list[bool]], spans: tuple[int, ...]) -> tuple[list[Node], _Looked]:
    """A chain of nodes; `held`: for each, the slots that have a copy."""
    looked = _Looked(spans)
    holder = looked.holder
    other = Holder((77,))
    path: list[Node] = []
    for depth, slots in enumerate(held):
        node = Node(path[-1] if path else None, b"", depth)
        if depth % 2:
            node.set_copy(other, 0, 5)  # the holder's copies are not always the ones stored inline
        for slot, is_held in enumerate(slots):
            if is_held:
                node.set_copy(holder, slot, 10 * depth + slot + 1)
        path.append(node)
    return path, looked


@st.composite
def _paths(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[bool]]]:
    spans = draw(st.sampled_from([(0, 1), (0, 2), (2, 0), (0, 3), (1,), (3,), (1, 2), (0, 1, 3), (2, 0, 1)]))
    held = draw(st.lists(st.tuples(*[st.sampled_from([True, True, True, False])] * len(spans)), max_size=9))
    return spans, list(map(list, held))


@given(_paths(), st.integers(0, 9))
def test_the_longest_hit_is_what_the_definition_says(
    path_of: tuple[tuple[int, ...], list[list[bool]]], max_blocks: int
) -> None:
    """Tried length by length, from the longest down."""
    spans, held = path_of
    path, looked = _path(held, spans)
    most = min(max_blocks, len(held))
    expected = next(
        count
        for count in range(most, -1, -1)
        if all(
            held[index][slot]
            for slot, span in enumerate(spans)
            for index in range(max(0, count - span) if span else 0, count)
        )
    )
    session = cast(Session, looked)
    num, hits = hits_in(session, AllocateItem(key("a"), ROOT, b""), None, path, max_blocks)
    assert num == expected
    for slot, span in enumerate(spans):
        first = max(0, expected - span) if span else 0
        assert hits[slot] == [10 * index + slot + 1 for index in range(first, expected)]
    along = cached_along(path, [session], max_blocks)
    assert along.get(looked.holder, 0) == expected
    assert expected or looked.holder not in along


# -- what is granted


def test_a_prompt_that_can_never_fit_beside_its_window_is_refused_with_the_group_and_the_cure() -> None:
    desk = worker_with_window((33, 6))
    assert granted_by(desk, "small", range(20)), "five blocks are all that it can fill"
    desk.free("small", 0)
    (refusal,), _ = desk.manager.allocate(desk.uplink(), [desk.item("a", range(21))])
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.field) == (Reason.NEVER_FITS, "tokens")
    for words in ("needs 6 of group 1", "4 as scratch and 2 in a window", "'w1' has 5", "--window-blocks"):
        assert words in refusal.message, refusal.message


def test_scratch_that_is_not_there_now_is_refused_with_the_group_and_nothing_is_granted() -> None:
    desk = worker_with_window((33, 8))
    granted_by(desk, "a", range(16))
    (refusal,), _ = desk.manager.allocate(desk.uplink(), [desk.item("b", range(50, 70))])
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.NO_BLOCKS
    assert "needed 4 blocks of group 1; worker 'w1' has 3 free" in refusal.message
    assert [counts.held for counts in desk.session.counts()] == [4, 4]


def test_new_blocks_come_out_of_the_budget_in_the_order_of_the_groups() -> None:
    """One block is left of the budget: the group with the window, which comes first, needs it; the other one has a cached block."""
    desk = Desk((9, 9), SIZE, windows=[(2, 2), (0, 0)], limits=Limits(max_total_blocks=5))
    for number, name in enumerate("ab"):
        granted_by(desk, name, [number] * 4)
    desk.free("a", 4)
    desk.refill(1)
    granted = granted_by(desk, "c", [7] * 4)
    assert ([one.block for one in granted.tables[0].scratch], granted.tables[1].blocks) == ([3], (1,))


@pytest.mark.parametrize(
    ("window", "ring", "field", "words"),
    [
        (1, 4, "window_tokens", "needed 2 to"),
        ((1 << 20) + 1, 1 << 20, "window_tokens", "got 1048577"),
        (6, 2, "ring_blocks", "needed 3 to"),
        (6, 0, "ring_blocks", "a window of 6 and the next token are in up to 3 blocks of 4; got 0"),
        (6, (1 << 16) + 1, "ring_blocks", "got 65537"),
    ],
)
def test_a_window_or_ring_that_cannot_work_is_refused(window: int, ring: int, field: str, words: str) -> None:
    layout = Layout(SIZE, (DenseSpec(9), WindowSpec(9, window_tokens=window, ring_blocks=ring)))
    refusal = refused(CacheManager(1).register, registration()._replace(layout=layout), 0.0)
    assert (refusal.reason, refusal.field) == (
        Reason.BAD_FIELD,
        f"kv_cache_config.groups[1].sliding_window.{field}",
    )
    assert words in refusal.message


# -- naming


def test_what_is_computed_and_not_named_is_no_hit() -> None:
    desk = worker_with_window()
    granted_by(desk, "a", range(17))
    desk.report("a", 16)
    assert granted_by(desk, "b", range(17), no_wait=True).num_cached_tokens == 0
    named = desk.name("a", 4)
    granted = granted_by(desk, "c", range(17), no_wait=True)
    assert granted.num_cached_tokens == 16
    assert dict(enumerate(granted.tables[1].blocks, 2)) == named, "shared, while its sequence lives"


def test_a_block_of_the_reserve_that_is_released_before_it_was_scratch_is_free() -> None:
    """The worker has taken it and given it back between two calls."""
    desk = worker_with_window()
    granted_by(desk, "a", range(5))
    (more,) = desk.refill(1, 1)
    desk.refill(0, 1)
    assert desk.session.pools[1].num_reserved == 1
    assert desk.tell(desk.statement("a", 0, released=[(0, more.block)])) == (0, ())
    assert desk.session.pools[1].num_reserved == 0
    assert desk.free_list_of(1)[0] == more.block


# -- releasing


def evicted_after(desk: Desk, block: int) -> int:
    """How many blocks of the group with the window are granted before this one."""
    return list(desk.session.pools[1].free_list()).index(block)


def test_a_window_that_was_hit_and_left_is_evicted_before_others() -> None:
    """A chat goes on from where it was: once that is released, the later window serves all that it could serve."""
    desk = worker_with_window()
    served_until(desk, "old", range(50, 59), 2)
    old = [block for block in desk.session.pools[1].free_list() if desk.session.pools[1].is_cached(block)]
    served_until(desk, "turn", range(9), 2)
    assert granted_by(desk, "a", range(20)).num_cached_tokens == 8
    hit = dict(desk.window("a").entries)
    desk.tell(desk.statement("a", 12, released=list(hit.items())))
    assert desk.session.pools[1].demoted() == list(hit.values())
    assert all(evicted_after(desk, block) < evicted_after(desk, other) for block in hit.values() for other in old)
    assert granted_by(desk, "b", [*range(8), 99], no_wait=True).num_cached_tokens == 8, "a hit as long as it is there"
    assert desk.session.pools[1].demoted() == []


def test_it_goes_first_also_where_the_budget_leaves_no_room_for_blocks_that_were_never_granted() -> None:
    """Those lie before all cached blocks on the free list, and are skipped."""
    desk = worker_with_window(limits=Limits(max_total_blocks=16))
    served_until(desk, "old", range(50, 59), 2)
    served_until(desk, "turn", range(9), 2)
    granted_by(desk, "a", range(17))
    hit = dict(desk.window("a").entries)
    desk.tell(desk.statement("a", 12, released=list(hit.items())))
    pool = desk.session.pools[1]
    assert pool.demoted() == list(hit.values())
    assert pool.num_withheld > 2
    num_free = pool.counts().free
    assert {one.block for one in desk.refill(num_free + 2, 1)} >= set(hit.values())


@pytest.mark.parametrize("wanted", [{}, {"boundaries": (9,)}, {"retention_interval": 5}], ids=str)
def test_a_hit_window_that_others_may_go_on_from_is_kept_like_any_hit(wanted: dict[str, Any]) -> None:
    """Because another prompt parts there, or the item has asked for it."""
    desk = worker_with_window()
    served_until(desk, "turn", range(9), 2)
    granted_by(desk, "a", range(20), **wanted)
    if not wanted:
        granted_by(desk, "other", [*range(8), 99, 99, 99, 99, 99], no_wait=True)
        desk.free("other", 13)
    hit = dict(desk.window("a").entries)
    desk.tell(desk.statement("a", 12, released=list(hit.items())))
    assert desk.session.pools[1].demoted() == []
    assert all(desk.session.pools[1].node(block) for block in hit.values())


def test_free_takes_back_the_scratch_that_the_worker_forgot() -> None:
    desk = worker_with_window()
    granted_by(desk, "a", range(20))
    named = desk.name("a", 4)
    desk.leave(desk.statement("a", 16))
    counts = desk.session.counts()[1]
    assert (counts.held, counts.cached) == (0, SPAN)
    assert desk.session.pools[1].demoted() == []
    assert [evicted_after(desk, named[index]) for index in (3, 2)] == [30, 31], "the last is the first to go"


def test_what_depends_on_an_evicted_prefix_is_emptied_and_granted_first() -> None:
    """The group without a window is small: its eviction makes the window behind it useless."""
    desk = worker_with_window((6, 33))
    served_until(desk, "a", range(17), 4)
    assert desk.session.counts()[1].cached == SPAN
    window = [desk.session.pools[1].copy_of(node) for node in _nodes(desk, range(16))[2:]]
    granted_by(desk, "b", range(50, 58))
    assert (desk.session.counts()[1].cached, desk.scratch("b")[0]) == (1, window[1])
    granted_by(desk, "c", range(70, 74))
    assert (desk.session.counts()[1].cached, desk.scratch("c")) == (0, [window[0]])
    assert desk.session.pools[1].num_evicted == 0, "nothing was evicted there: it had become useless"


def test_what_is_emptied_is_no_longer_one_that_goes_before_the_others() -> None:
    desk = worker_with_window((6, 33))
    served_until(desk, "turn", range(5), 1)
    granted_by(desk, "a", range(17))
    hit = dict(desk.window("a").entries)
    desk.tell(desk.statement("a", 12, released=list(hit.items())))
    desk.free("a", 16)
    assert desk.session.pools[1].demoted() == list(hit.values())
    granted_by(desk, "b", range(50, 70))
    assert (desk.session.pools[1].demoted(), desk.session.counts()[1].cached) == ([], 0)


def _nodes(desk: Desk, tokens: Any) -> list[Node]:
    tree = desk.manager._tree
    root = tree.find_root(ROOT, SIZE)
    assert root is not None
    return tree.match(root, token_bytes(tokens), SIZE, len(list(tokens)) // SIZE)


# -- boundaries


def test_a_window_is_to_be_named_where_a_prompt_leaves_one_that_ends_there_and_is_being_computed() -> None:
    desk = worker_with_window()
    granted_by(desk, "a", range(9))
    assert granted_by(desk, "b", [*range(8), *[94] * 9], no_wait=True).boundaries == (8, 16)


def test_windows_are_to_be_named_where_the_item_asks_for_it() -> None:
    """Rounded down to blocks; an interval is rounded up."""
    desk = worker_with_window()
    assert granted_by(desk, "a", range(30), boundaries=(10, 3, 99)).boundaries == (8, 28)
    assert granted_by(desk, "b", range(100, 130), retention_interval=7).boundaries == (8, 16, 24, 28)
    desk.name("b", 2)
    assert granted_by(desk, "b", range(100, 130)).boundaries == (16, 24, 28), "those that are still to come"


def test_there_are_at_most_eight_and_the_end_is_one_of_them() -> None:
    desk = worker_with_window()
    boundaries = granted_by(desk, "a", range(60), retention_interval=1).boundaries
    assert boundaries == (*range(4, 32, 4), 56)
    (refusal,), _ = desk.manager.allocate(desk.uplink(), [desk.item("b", [9] * 9, boundaries=(4,) * 9)])
    assert isinstance(refusal, Refusal)
    assert refusal.message == "boundaries: at most 8, got 9"


def test_a_leader_is_told_where_a_second_prompt_parts_which_then_hits_there() -> None:
    desk = worker_with_window()
    granted_by(desk, "a", range(29))
    second = [*range(12), *range(60, 70)]
    assert desk.allocate("b", second) == Wait(key("a"), 12)
    (entry,) = desk.session.downlink.pending()
    assert entry.entry == Boundary(key("a"), 12)
    assert desk.allocate("b", second) == Wait(key("a"), 12)
    assert len(desk.session.downlink.pending()) == 1, "it is told once"
    desk.name("a", 3)
    assert granted_by(desk, "b", second).num_cached_tokens == 12


@pytest.mark.parametrize(
    "limits", [Limits(max_boundaries=2), Limits(max_downlink_entries=1)], ids=["boundaries", "downlink"]
)
def test_a_leader_that_cannot_be_told_of_another_boundary_is_waited_for_up_to_the_last_one_before_it(
    limits: Limits,
) -> None:
    """Because it has as many as it may have, or its downlink is full. Where no boundary comes before, nobody waits."""
    desk = worker_with_window(limits=limits)
    granted_by(desk, "a", range(29), boundaries=(8,))
    desk.refill(1, 1)
    assert desk.allocate("b", [*range(16), 99]) == Wait(key("a"), 8)
    assert len(desk.session.downlink.pending()) == 1, "the grant"
    assert granted_by(desk, "c", [*range(4), 99]).num_cached_tokens == 0


# -- looking


def test_explain_says_which_part_the_other_groups_would_have_served() -> None:
    desk = worker_with_window()
    served_until(desk, "a", range(29), 2, 7)
    (worker,) = desk.manager.explain(ROOT, token_bytes([*range(24), 99])).workers
    assert (worker.num_cached_tokens, worker.miss.cause) == (8, MissCause.WINDOW_NOT_KEPT)
    assert (worker.miss.position, worker.miss.num_passed_tokens) == (8, 24)


def test_explain_promises_no_longer_hit_than_allocate_serves() -> None:
    """All of the prompt is a hit, but its last token is computed; and one block less is none."""
    desk = worker_with_window()
    served_until(desk, "a", range(17), 4)
    (worker,) = desk.manager.explain(ROOT, token_bytes(range(16))).workers
    assert worker.num_cached_tokens == 0
    assert granted_by(desk, "b", range(16)).num_cached_tokens == 0


def test_a_worker_without_a_group_that_sees_everything_is_explained_too() -> None:
    """Its window may hold what an earlier window has lost."""
    desk = Desk((17,), SIZE, windows=[(WINDOW, RING)])
    served_until(desk, "a", range(17), 4)
    assert granted_by(desk, "b", range(17)).num_cached_tokens == 16
    desk.lockstep.route(ROOT, token_bytes([*range(12), 99]))
    (worker,) = desk.manager.explain(ROOT, token_bytes([*range(12), 99])).workers
    assert (worker.num_cached_tokens, worker.miss.cause) == (0, MissCause.WINDOW_NOT_KEPT)
    assert worker.miss.num_passed_tokens == 12
