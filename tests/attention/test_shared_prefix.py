"""Which parts of a step are found to share leading blocks."""

from __future__ import annotations

import random

from kvpool.worker_service.attention.shared_prefix import SharedPrefix, find_shared_prefixes


def find(tables: list[list[int]], starts: list[int], min_saved: int = 1) -> list[SharedPrefix]:
    return find_shared_prefixes(tables, starts, block_size=4, min_saved_tokens=min_saved)


def test_blocks_that_are_being_written_do_not_count() -> None:
    """The second part begins inside block 2: only block 1 is complete for it."""
    assert find([[1, 2, 3], [1, 2, 4]], [11, 7]) == [SharedPrefix([0, 1], 1)]
    assert find([[1, 2], [1, 2]], [0, 4]) == []


def test_small_savings_are_left_alone() -> None:
    tables = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert find(tables, [12] * 3, min_saved=17) == []
    assert find(tables, [12] * 3, min_saved=16) == [SharedPrefix([0, 1, 2], 2)]


def most_saved(tables: list[list[int]], depth: int = 0) -> int:
    """Block reads that the best cut saves, by trying both cuts at every depth."""
    groups: dict[int, list[list[int]]] = {}
    for table in tables:
        if len(table) > depth:
            groups.setdefault(table[depth], []).append(table)
    return sum(
        max((len(group) - 1) * (depth + 1), most_saved(group, depth + 1)) for group in groups.values() if len(group) > 1
    )


def test_no_other_cut_saves_more() -> None:
    """Random families, also none, strangers and several at once: what is found is disjoint, is shared, and saves as much as any
    cut."""
    numbers = random.Random(4)
    num_found = 0
    for _ in range(2000):
        tables: list[list[int]] = []
        for _ in range(numbers.randrange(9)):
            base = numbers.choice(tables)[: numbers.randrange(6)] if tables and numbers.random() < 0.8 else []
            tables.append(base + [numbers.randrange(1, 4) for _ in range(numbers.randrange(1, 5))])
        found = find(tables, [4 * len(table) for table in tables])
        parts = [part for prefix in found for part in prefix.parts]
        assert len(parts) == len(set(parts))
        for prefix in found:
            assert prefix.parts == sorted(prefix.parts)
            assert len({tuple(tables[part][: prefix.num_blocks]) for part in prefix.parts}) == 1
        assert sum(prefix.saved_blocks for prefix in found) == most_saved(tables)
        num_found += len(found)
    assert num_found > 2000


def test_thousands_of_sequences_that_branch_off_one_after_the_other() -> None:
    """As deep as many: no call stack is as deep as this."""
    count = 3000
    trunk = list(range(1, count + 2))
    tables = [[*trunk[: index + 1], count + 10 + index] for index in range(count)]
    (prefix,) = find(tables, [4 * len(table) for table in tables])
    # m sequences that share n blocks save (m − 1) · n, most with half of the sequences and half of the blocks.
    assert prefix.num_blocks == len(trunk) // 2
    assert prefix.parts == list(range(prefix.num_blocks - 1, count))
