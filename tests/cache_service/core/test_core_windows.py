"""Groups with a sliding window, and of recurrent layers: scratch that only the worker knows, windows and snapshots that are named
at boundaries, and hits with holes.

Drawn histories (test_core_state_machine.py) have such groups, and a model says what is right. Here is an example of the main rules,
what a refusal says, and what histories seldom reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.cache_service.core.copies import Holder
from kvpool.cache_service.core.groups.dense import DenseSpec
from kvpool.cache_service.core.groups.window import WindowSpec
from kvpool.cache_service.core.hits import cached_along, hits_in
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    BlockMissCause,
    Boundary,
    Layout,
    Limits,
    Wait,
)
from kvpool.cache_service.core.prefix_tree import Node
from kvpool.cache_service.core.refusal import Reason
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import Lockstep, key, refused, registration, token_bytes

SIZE = 4
WINDOW, SPAN, RING, GRID = 6, 2, 4, 2
"""Tokens; the blocks that a hit needs; scratch blocks of a sequence, one more than must be; blocks of the grid of a state."""


def worker_with_window(
    num_blocks: tuple[int, int] = (33, 33), *, limits: Limits | None = None, lockstep: Lockstep | None = None
) -> Desk:
    """Group 0 sees everything, group 1 the last six tokens."""
    return Desk(num_blocks, SIZE, windows=[(0, 0), (WINDOW, RING)], limits=limits, lockstep=lockstep)


def worker_with_state(num_blocks: tuple[int, int] = (33, 33)) -> Desk:
    """Group 0 sees everything, group 1 has a state."""
    return Desk(num_blocks, SIZE, windows=[(0, 0), (0, 2)], grids=[0, GRID])


def served_until(desk: Desk, name: str, tokens: Any, *boundaries: int) -> None:
    """A request that names its windows at these boundaries, in blocks, and ends."""
    desk.grant(name, tokens, no_wait=True)
    for boundary in boundaries:
        desk.name(name, boundary)
    desk.free(name, len(list(tokens)))


# -- hits


def test_a_hit_needs_the_whole_prefix_in_full_groups_and_the_last_window_in_the_others() -> None:
    """The prompt of five blocks was computed; only the window before block 4 was named: a hit is 4 blocks long, or none."""
    desk = worker_with_window()
    served_until(desk, "a", range(20), 4)
    longer = desk.grant("b", [*range(20), 99])
    full, window = longer.tables
    assert longer.num_cached_tokens == 16
    assert full.blocks[:4] == (1, 2, 3, 4)
    assert (window.start, len(window.blocks), len(window.scratch)) == (2, SPAN, 2)
    assert desk.grant("c", [*range(12), 99, 99]).num_cached_tokens == 0, "no window ends after three blocks"


SPANS = [(0, 1), (0, 2), (2, 0), (0, 3), (1,), (3,), (1, 2), (0, 1, 3), (2, 0, 1)]
"""Layouts: for each group the blocks of its window, 0 for none."""


@given(
    st.sampled_from(SPANS),
    st.lists(st.tuples(*[st.sampled_from([True] * 3 + [False])] * 3), max_size=9),
    st.integers(0, 9),
)
def test_the_longest_hit_is_what_the_definition_says(
    spans: tuple[int, ...], held: list[tuple[bool, ...]], max_blocks: int
) -> None:
    """`held`: for each node of a path, in which groups there is a copy. Tried length by length, from the longest down."""
    manager = CacheManager(1)
    windows = [(span and span * SIZE + 1, span and span + 1) for span in spans]
    manager.register(registration(num_blocks=(9,) * len(spans), block_size=SIZE, windows=windows), 0.0)
    session = manager.worker("w1")
    path: list[Node] = []
    for depth, slots in enumerate(held):
        path.append(Node(path[-1] if path else None, b"", depth))
        if depth % 2:
            path[-1].set_copy(Holder((77,)), 0, 5)  # the session's copies are not always the ones stored inline
        for slot in range(len(spans)):
            if slots[slot]:
                path[-1].set_copy(session.holder, slot, 10 * depth + slot + 1)

    def needed(num_hits: int, span: int) -> range:
        return range(max(0, num_hits - span) if span else 0, num_hits)

    expected = next(
        num_hits
        for num_hits in range(min(max_blocks, len(held)), -1, -1)
        if all(held[index][slot] for slot, span in enumerate(spans) for index in needed(num_hits, span))
    )
    num, hits = hits_in(session, AllocateItem(key("a"), ROOT, b""), None, path, max_blocks)
    assert num == expected
    assert hits == [[10 * i + slot + 1 for i in needed(num, span)] for slot, span in enumerate(spans)]
    along = cached_along(path, [session], max_blocks)
    assert along.get(session.holder, 0) == expected
    assert expected or session.holder not in along


# -- what is granted


@pytest.mark.parametrize(
    ("worker", "num_blocks", "words"),
    [
        (worker_with_window, 6, ["needs 6 of group 1, 4 as scratch and 2 in a window", "has 5", "--window-blocks"]),
        (worker_with_state, 3, ["needs 3 of group 1, 2 as scratch and 1 in a snapshot", "has 2", "--state-blocks"]),
    ],
)
def test_a_prompt_that_can_never_fit_beside_what_it_hits_is_refused_with_the_group_and_the_cure(
    worker: Callable[[tuple[int, int]], Desk], num_blocks: int, words: list[str]
) -> None:
    desk = worker((33, num_blocks))
    desk.grant("all that it can fill", range((num_blocks - 1) * SIZE))
    desk.free("all that it can fill")
    refusal = desk.refusal("a", range(21))
    assert (refusal.reason, refusal.field) == (Reason.NEVER_FITS, "tokens")
    assert all(word in refusal.message for word in words), refusal.message


def test_scratch_that_is_not_there_now_is_refused_with_the_group_and_nothing_is_granted() -> None:
    desk = worker_with_window((33, 8))
    desk.grant("a", range(16))
    refusal = desk.refusal("b", range(50, 70))
    assert refusal.reason is Reason.NO_BLOCKS
    assert "needed 4 blocks of group 1; worker 'w1' has 3 free" in refusal.message
    assert [counts.held for counts in desk.session.counts()] == [4, 4]


def test_new_blocks_come_out_of_the_budget_in_the_order_of_the_groups() -> None:
    """One block is left of the budget: the group with the window, which comes first, needs it; the other one has a cached block."""
    desk = Desk((9, 9), SIZE, windows=[(2, 2), (0, 0)], limits=Limits(max_total_blocks=5))
    for number, name in enumerate("ab"):
        desk.grant(name, [number] * 4)
    desk.free("a", 4)
    desk.refill(1)
    granted = desk.grant("c", [7] * 4)
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


def test_a_block_of_the_reserve_that_is_released_before_it_was_scratch_is_free() -> None:
    """The worker has taken it and given it back between two calls."""
    desk = worker_with_window()
    desk.grant("a", range(5))
    (more,) = desk.refill(1, 1)
    desk.refill(0, 1)
    assert desk.session.pools[1].num_reserved == 1
    assert desk.tell(desk.statement("a", 0, released=[(0, more.block)])) == (0, ())
    assert desk.session.pools[1].num_reserved == 0
    assert desk.free_list(1)[0] == more.block


# -- releasing


def hit_and_left(desk: Desk, num_tokens: int = 20, other: str = "", **wanted: Any) -> list[int]:
    """The blocks of a window that a sequence has hit, going on from there, and released. `other`: a prompt that parts there too."""
    served_until(desk, "turn", range(9), 2)
    assert desk.grant("a", range(num_tokens), **wanted).num_cached_tokens == 8
    if other:
        desk.grant(other, [*range(8), 99, 99, 99, 99, 99], no_wait=True)
        desk.free(other, 13)
    hit = dict(desk.window("a").entries)
    desk.tell(desk.statement("a", 12, released=list(hit.items())))
    return list(hit.values())


def test_a_window_that_was_hit_and_left_is_evicted_before_others() -> None:
    """A chat goes on from where it was: once that is released, the later window serves all that it could serve."""
    desk = worker_with_window()
    served_until(desk, "old", range(50, 59), 2)
    pool = desk.session.pools[1]
    old = [block for block in pool.free_list() if pool.is_cached(block)]
    hit = hit_and_left(desk)
    assert pool.demoted() == hit
    order = desk.free_list(1)
    assert max(map(order.index, hit)) < min(map(order.index, old))
    assert desk.grant("b", [*range(8), 99], no_wait=True).num_cached_tokens == 8, "a hit as long as it is there"
    assert pool.demoted() == []


def test_it_goes_first_also_where_the_budget_leaves_no_room_for_blocks_that_were_never_granted() -> None:
    """Those lie before all cached blocks on the free list, and are skipped."""
    desk = worker_with_window(limits=Limits(max_total_blocks=16))
    served_until(desk, "old", range(50, 59), 2)
    hit = hit_and_left(desk, 17)
    pool = desk.session.pools[1]
    assert pool.demoted() == hit
    assert pool.num_withheld > 2
    assert {one.block for one in desk.refill(pool.counts().free + 2, 1)} >= set(hit)


@pytest.mark.parametrize("wanted", [{"other": "b"}, {"boundaries": (9,)}, {"retention_interval": 5}], ids=str)
def test_a_hit_window_that_others_may_go_on_from_is_kept_like_any_hit(wanted: dict[str, Any]) -> None:
    """Because another prompt parts there, or the item has asked for it."""
    desk = worker_with_window()
    hit = hit_and_left(desk, **wanted)
    assert desk.session.pools[1].demoted() == []
    assert all(map(desk.session.pools[1].node, hit))


def test_free_takes_back_the_scratch_that_the_worker_forgot() -> None:
    desk = worker_with_window()
    desk.grant("a", range(20))
    named = desk.name("a", 4)
    desk.leave(desk.statement("a", 16))
    counts = desk.session.counts()[1]
    assert (counts.held, counts.cached) == (0, SPAN)
    assert desk.session.pools[1].demoted() == []
    assert desk.free_list(1)[-2:] == [named[3], named[2]], "the last is the first to go"


def test_what_depends_on_an_evicted_prefix_is_emptied_and_granted_first() -> None:
    """The group without a window is small: its eviction makes the window behind it useless."""
    desk = worker_with_window((6, 33))
    served_until(desk, "a", range(17), 4)
    assert desk.session.counts()[1].cached == SPAN
    window = [desk.session.pools[1].copy_of(node) for node in _nodes(desk, range(16))[2:]]
    desk.grant("b", range(50, 58))
    assert (desk.session.counts()[1].cached, desk.scratch("b")[0]) == (1, window[1])
    desk.grant("c", range(70, 74))
    assert (desk.session.counts()[1].cached, desk.scratch("c")) == (0, [window[0]])
    assert desk.session.pools[1].num_evicted == 0, "nothing was evicted there: it had become useless"


def _nodes(desk: Desk, tokens: Any) -> list[Node]:
    tree = desk.manager._tree
    root = tree.find_root(ROOT, SIZE)
    assert root is not None
    return tree.match(root, token_bytes(tokens), SIZE, len(list(tokens)) // SIZE)


# -- boundaries


def test_a_window_is_to_be_named_where_a_prompt_leaves_one_that_ends_there_and_is_being_computed() -> None:
    desk = worker_with_window()
    desk.grant("a", range(9))
    assert desk.grant("b", [*range(8), *[94] * 9], no_wait=True).boundaries == (8, 16)


def test_windows_are_to_be_named_where_the_item_asks_for_it() -> None:
    """Rounded down to blocks; an interval is rounded up."""
    desk = worker_with_window()
    assert desk.grant("a", range(30), boundaries=(10, 3, 99)).boundaries == (8, 28)
    assert desk.grant("b", range(100, 130), retention_interval=7).boundaries == (8, 16, 24, 28)
    desk.name("b", 2)
    assert desk.grant("b", range(100, 130)).boundaries == (16, 24, 28), "those that are still to come"


def test_there_are_at_most_eight_and_the_end_is_one_of_them() -> None:
    desk = worker_with_window()
    boundaries = desk.grant("a", range(60), retention_interval=1).boundaries
    assert boundaries == (*range(4, 32, 4), 56)
    refusal = desk.refusal("b", [9] * 9, boundaries=(4,) * 9)
    assert refusal.message == "boundaries: at most 8, got 9"


def test_a_leader_is_told_where_a_second_prompt_parts_which_then_hits_there() -> None:
    desk = worker_with_window()
    desk.grant("a", range(29))
    second = [*range(12), *range(60, 70)]
    assert desk.allocate("b", second) == Wait(key("a"), 12)
    (entry,) = desk.session.downlink.pending()
    assert entry.entry == Boundary(key("a"), 12)
    assert desk.allocate("b", second) == Wait(key("a"), 12)
    assert len(desk.session.downlink.pending()) == 1, "it is told once"
    desk.name("a", 3)
    assert desk.grant("b", second).num_cached_tokens == 12


@pytest.mark.parametrize(
    "limits", [Limits(max_boundaries=2), Limits(max_downlink_entries=1)], ids=["boundaries", "downlink"]
)
def test_a_leader_that_cannot_be_told_of_another_boundary_is_waited_for_up_to_the_last_one_before_it(
    limits: Limits,
) -> None:
    """Because it has as many as it may have, or its downlink is full. Where no boundary comes before, nobody waits."""
    desk = worker_with_window(limits=limits)
    desk.grant("a", range(29), boundaries=(8,))
    desk.refill(1, 1)
    assert desk.allocate("b", [*range(16), 99]) == Wait(key("a"), 8)
    assert len(desk.session.downlink.pending()) == 1, "the grant"
    assert desk.grant("c", [*range(4), 99]).num_cached_tokens == 0


# -- looking


@pytest.mark.parametrize(
    ("worker", "cause"),
    [(worker_with_window, BlockMissCause.WINDOW_NOT_KEPT), (worker_with_state, BlockMissCause.SNAPSHOT_NOT_KEPT)],
)
def test_explain_says_which_part_the_other_groups_would_have_served(
    worker: Callable[[], Desk], cause: BlockMissCause
) -> None:
    desk = worker()
    served_until(desk, "a", range(29), 2)
    (found,) = desk.manager.explain(ROOT, token_bytes([*range(24), 99])).workers
    assert (found.num_cached_tokens, found.miss.cause) == (8, cause)
    assert (found.miss.position, found.miss.num_passed_tokens) == (8, 24)


def test_a_worker_without_a_group_that_sees_everything_is_explained_too() -> None:
    """Its window may hold what an earlier window has lost."""
    desk = Desk((17,), SIZE, windows=[(WINDOW, RING)])
    served_until(desk, "a", range(17), 4)
    assert desk.grant("b", range(17)).num_cached_tokens == 16
    desk.lockstep.route(ROOT, token_bytes([*range(12), 99]))
    (worker,) = desk.manager.explain(ROOT, token_bytes([*range(12), 99])).workers
    assert (worker.num_cached_tokens, worker.miss.cause) == (0, BlockMissCause.WINDOW_NOT_KEPT)
    assert worker.miss.num_passed_tokens == 12


# -- states: a snapshot is a window of one block, on a grid


def test_what_the_item_asks_for_is_rounded_down_and_its_interval_up() -> None:
    desk = worker_with_state()
    assert desk.grant("a", range(33), boundaries=(13, 7, 29)).boundaries == (8, 24, 32)
    assert desk.grant("b", range(50, 83), retention_interval=9).boundaries == (16, 32)


def test_a_second_prompt_waits_for_the_place_of_the_grid_before_it_parts_and_its_leader_is_told() -> None:
    """The second of the two hits, not the third."""
    desk = worker_with_state()
    desk.grant("a", range(33))
    assert desk.allocate("b", [*range(21), 99]) == Wait(key("a"), 16)
    assert [one.entry for one in desk.session.downlink.pending()] == [Boundary(key("a"), 16)]
    desk.name("a", 4)
    assert desk.grant("b", [*range(21), 99]).num_cached_tokens == 16


def test_two_snapshots_of_one_update_are_each_one_of_its_own() -> None:
    """Neither is the beginning of the other, as with windows: both are kept like any hit."""
    desk = Desk((33, 33), SIZE, windows=[(0, 0), (0, 3)], grids=[0, 1])
    desk.grant("a", range(20))
    first, second = desk.scratch("a")[1:]
    desk.tell(desk.statement("a", 8, bound={0: first, 1: second}))
    assert desk.window("a").ends == {1, 2}
    desk.tell(desk.statement("a", 12, released=[(0, first), (1, second)]))
    assert desk.session.pools[1].demoted() == []


def test_explain_says_which_of_window_and_snapshot_is_missing() -> None:
    desk = Desk((33, 33, 33), SIZE, windows=[(0, 0), (6, 5), (0, 2)], grids=[0, 0, GRID])
    served_until(desk, "a", range(29), 2)
    desk.grant("b", range(29))
    scratch = desk.scratch("b", 1)
    desk.tell(desk.statement("b", 28, bound={4: scratch[0], 5: scratch[1]}, group=1))
    desk.free("b", 28)
    (worker,) = desk.manager.explain(ROOT, token_bytes([*range(26), 99])).workers
    assert (worker.num_cached_tokens, worker.miss.cause) == (8, BlockMissCause.SNAPSHOT_NOT_KEPT), "the window is there"
    desk.grant("c", range(50, 79), no_wait=True)
    snapshot = desk.scratch("c", 2)[0]
    desk.tell(desk.statement("c", 28, bound={5: snapshot}, group=2))
    desk.free("c", 28)
    (worker,) = desk.manager.explain(ROOT, token_bytes([*range(50, 76), 99])).workers
    assert (worker.num_cached_tokens, worker.miss.cause) == (0, BlockMissCause.WINDOW_NOT_KEPT), "the snapshot is there"


@pytest.mark.parametrize(
    ("num_tokens", "cause"),
    [(12, BlockMissCause.PARTIAL_TAIL), (15, BlockMissCause.PARTIAL_TAIL), (16, BlockMissCause.LAST_TOKEN)],
)
def test_what_lies_beyond_the_last_place_of_the_grid_is_a_tail(num_tokens: int, cause: BlockMissCause) -> None:
    """Of sixteen tokens all would be a hit, were it not for the last."""
    desk = worker_with_state()
    served_until(desk, "a", range(29), 2)
    (worker,) = desk.manager.explain(ROOT, token_bytes(range(num_tokens))).workers
    assert (worker.num_cached_tokens, worker.miss.cause) == (8, cause)
