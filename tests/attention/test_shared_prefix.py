"""Which parts of a step are found to share leading blocks."""

from __future__ import annotations

from worker_service.attention.shared_prefix import SharedPrefix, find_shared_prefixes


def find(tables: list[list[int]], starts: list[int], min_saved: int = 1) -> list[SharedPrefix]:
    return find_shared_prefixes(tables, starts, block_size=4, min_saved_tokens=min_saved)


def test_all_share_what_all_have() -> None:
    assert find([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]], [13, 13, 10]) == [SharedPrefix([0, 1, 2], 2)]


def test_blocks_that_are_being_written_do_not_count() -> None:
    """The second part begins inside block 2: only block 1 is complete for it."""
    assert find([[1, 2, 3], [1, 2, 4]], [11, 7]) == [SharedPrefix([0, 1], 1)]
    assert find([[1, 2], [1, 2]], [0, 4]) == []


def test_strangers_share_nothing() -> None:
    assert find([[1, 2], [3, 2], [4]], [8, 8, 4]) == []


def test_two_families_are_found_beside_each_other() -> None:
    tables = [[1, 2, 9], [5, 6, 7], [1, 2, 8], [5, 6, 3]]
    assert find(tables, [12] * 4) == [SharedPrefix([0, 2], 2), SharedPrefix([1, 3], 2)]


def test_the_cut_that_saves_more_is_taken() -> None:
    """One part with a short common beginning does not spoil the long one of the others."""
    tables = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 7]]
    assert find(tables, [20, 20, 8]) == [SharedPrefix([0, 1], 4)]


def test_small_savings_are_left_alone() -> None:
    tables = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert find(tables, [12] * 3, min_saved=17) == []
    assert find(tables, [12] * 3, min_saved=16) == [SharedPrefix([0, 1, 2], 2)]


def test_nothing_to_find_in_an_empty_step() -> None:
    assert find([], []) == []
