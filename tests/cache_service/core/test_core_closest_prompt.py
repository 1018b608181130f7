"""The cached prompt that comes closest: the token where the two part, and what it costs. Bounded, whatever the cache holds."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.cache_service.core import closest_prompt, other_roots
from kvpool.cache_service.core.closest_prompt import MAX_CHILDREN, ClosestPath
from kvpool.cache_service.core.groups.dense import DenseSpec
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import AllocateItem, BlockMissCause, Layout, Root, SequenceUpdate, Uplink
from kvpool.cache_service.core.prefix_tree import Node, PrefixTree
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import FINGERPRINT, Lockstep, key, registration, token_bytes
from tests.cache_service.core.test_core_past_mistakes import lines_of


def closest(desk: Desk, tokens: list[int]) -> ClosestPath | None:
    """What Explain says of all workers."""
    return desk.manager.explain(ROOT, token_bytes(tokens)).closest


def prompt(date: int, length: int = 33) -> list[int]:
    """Seven equal tokens, the date, and a document."""
    return [*range(100, 107), date, *range(200, 200 + length - 8)]


def test_the_token_where_they_part_is_named_with_what_it_costs() -> None:
    """Your prompt has 21 where a cached one has 20, at token 7; after it 28 more tokens would have been served."""
    desk = Desk()
    desk.serve("a", prompt(20))
    found = closest(desk, prompt(21))
    assert found == ClosestPath(7, 21, 20, 1, 1, 28, False)
    assert desk.serve("b", prompt(21)) == 4
    assert desk.serve("c", prompt(20)) == 4 + found.num_tokens_gained


def test_as_many_prompts_are_counted_as_have_the_other_token() -> None:
    desk = Desk(num_blocks=200)
    for index in range(5):
        desk.serve(str(index), [*prompt(20), index, 1, 2, 3, 4])
    desk.serve("other", prompt(19))
    found = closest(desk, [*prompt(21), 9])
    assert found is not None
    assert (found.num_equal_tokens, found.cached_token, found.num_prompts) == (7, 20, 5)


def test_the_prompt_that_would_help_most_is_preferred_to_one_that_agrees_a_token_longer() -> None:
    desk = Desk()
    document = list(range(200, 216))
    desk.serve("longer", [1, 2, 3, 8, 0])
    desk.serve("useful", [1, 2, 7, 4, *document, 0])
    found = closest(desk, [1, 2, 3, 4, *document, 0])
    assert found == ClosestPath(2, 3, 7, 1, 1, 20, False)


def test_several_tokens_of_the_block_that_differ_are_counted() -> None:
    desk = Desk()
    desk.serve("a", [1, 7, 3, 8, *range(200, 209)])
    assert closest(desk, [1, 2, 3, 4, *range(200, 209)]) == ClosestPath(1, 2, 7, 2, 1, 12, False)


def test_nothing_is_gained_from_what_no_worker_holds_as_a_whole() -> None:
    """The blocks after the date have been evicted: only the date's own block would be served."""
    desk = Desk(num_blocks=4)
    desk.serve("a", prompt(20, 12))
    desk.grant("b", [1, 2, 3])
    found = closest(desk, prompt(21, 17))
    assert found is not None
    assert (found.num_equal_tokens, found.num_tokens_gained) == (7, 4)


def test_a_prompt_that_is_only_being_computed_is_not_close() -> None:
    desk = Desk()
    desk.grant("a", prompt(20))
    assert closest(desk, prompt(21)) is None


def test_a_prompt_that_ends_before_it_parts_has_no_token_to_name() -> None:
    desk = Desk()
    desk.serve("a", prompt(20))
    found = closest(desk, prompt(20)[:6])
    assert found == ClosestPath(6, None, None, 0, 1, 0, False)
    assert closest(desk, prompt(20)[:8]) is None


def test_prompts_under_other_roots_are_not_close() -> None:
    desk = Desk()
    desk.serve("a", prompt(20), root=Root(FINGERPRINT, tenant_salt="b"))
    desk.serve("b", prompt(20), root=Root(FINGERPRINT, adapter="b"))
    assert closest(desk, prompt(21)) is None


def test_the_closest_prompt_may_be_on_any_worker_asked_for() -> None:
    lockstep = Lockstep()
    one, two = (Desk(worker_id=worker_id, lockstep=lockstep) for worker_id in ("w1", "w2"))
    two.serve("a", prompt(20))
    found = closest(one, prompt(21))
    assert found is not None
    assert found.num_tokens_gained == 28
    assert one.manager.explain(ROOT, token_bytes(prompt(21)), "w1").closest is None


def _filled(num_prompts: int, root_of: Any, tokens_of: Any) -> CacheManager:
    """A manager with one worker that has served many short prompts."""
    manager = CacheManager(1)
    introduction = registration()._replace(layout=Layout(4, (DenseSpec(32 * num_prompts),)))
    number = manager.register(introduction, 0.0).session
    call_no = 0
    for begin in range(0, num_prompts, 1000):
        names = range(begin, min(begin + 1000, num_prompts))
        items = [AllocateItem(key(str(i)), root_of(i), token_bytes(tokens_of(i)), no_wait=True) for i in names]
        manager.allocate(Uplink(number, call_no + 1), items)
        ends = [SequenceUpdate(key(str(i)), 0, b"", len(tokens_of(i)), ()) for i in names]
        manager.free(Uplink(number, call_no + 2), ends)
        call_no += 2
    return manager


def test_a_node_with_ten_thousand_children_costs_no_more_than_one_with_two_thousand() -> None:
    def tokens_of(index: int) -> list[int]:
        return [1, 2, 3, 4, 5, 6, index + 10, 7, 8, 9, 10, 11, 12]

    large, small = (_filled(count, lambda _: ROOT, tokens_of) for count in (10_000, 2 * MAX_CHILDREN))
    asked = [1, 2, 3, 4, 5, 6, 5, 7, 8, 9, 10, 11, 12]
    found = large.explain(ROOT, token_bytes(asked)).closest
    assert found is not None
    assert found.truncated
    assert (found.num_equal_tokens, found.num_tokens_gained) == (6, 8)
    costs = [lines_of(lambda: manager.explain(ROOT, token_bytes(asked))) for manager in (large, small)]  # noqa: B023
    assert costs[0] <= 1.2 * costs[1], costs


def test_thousands_of_roots_cost_no_more_than_a_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of one salt: at most MAX_ROOTS of them are searched, the latest ones."""
    manager = _filled(3000, lambda i: Root(FINGERPRINT, adapter=str(i)), lambda i: [i, 1, 2, 3, 4])
    visited: list[Node] = []
    match = PrefixTree.match

    def counting(tree: PrefixTree, root: Node, *arguments: Any) -> list[Node]:
        visited.append(root)
        return match(tree, root, *arguments)

    monkeypatch.setattr(PrefixTree, "match", counting)
    (found,) = manager.explain(ROOT, token_bytes([2999, 1, 2, 3, 4])).workers
    assert found.miss.cause is BlockMissCause.OTHER_ROOT
    assert len(visited) == 1
    (found,) = manager.explain(ROOT, token_bytes([0, 1, 2, 3, 4])).workers
    assert found.miss.cause is BlockMissCause.NEVER_SEEN
    assert len(visited) - 1 == other_roots.MAX_ROOTS


def test_a_long_prompt_in_many_copies_is_followed_for_a_bounded_number_of_nodes() -> None:
    """Each of the children goes on like the prompt; only so many nodes are visited, and the answer says that it was cut short."""
    rest = list(range(500, 600))
    manager = _filled(200, lambda _: ROOT, lambda i: [i + 10, 1, 2, 3, *rest])
    found = manager.explain(ROOT, token_bytes([5, 1, 2, 3, *rest, 0])).closest
    assert found is not None
    assert found.num_tokens_gained == 4 + len(rest)
    assert found.truncated
    assert 200 * len(rest) // 4 > closest_prompt.MAX_NODES
