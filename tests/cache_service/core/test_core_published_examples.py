"""The published experiment, worked examples, and mistakes of other systems: block size 4, max_tokens=1, good and bad hashes.

Lockstep compares tables, counts, the order of eviction and the tree with the model's after every call.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.cache_service.core.desk import Desk

A, B, TAIL = [1, 2, 3, 4], [1, 9, 3, 4], [5, 6, 7, 8]

EXAMPLES: dict[str, tuple[int, list[tuple[Sequence[int], int]]]] = {
    "an 18-token prompt has 16 tokens cached the second time": (64, [(range(18), 0), (range(18), 16)]),
    "hello world cat and hello world dog share three blocks": (64, [(b"Hello world cat", 0), (b"Hello world dog", 12)]),
    "equal blocks after different prefixes are two entries": (
        64,
        [([*A, *TAIL], 0), ([*B, *TAIL], 0), ([*A, *TAIL, 0], 8), ([*B, *TAIL, 0], 8)],
    ),
    "prompts of 22 and 20 tokens with nothing in common seal 5 blocks each": (
        64,
        [(range(22), 0), (range(500, 520), 0), ([*range(20), 7], 20), ([*range(500, 520), 7], 20)],
    ),
    "a block that differs early spoils everything after it": (
        64,
        [(range(1, 9), 0), (range(1, 11), 8), ([0, *range(2, 11)], 0)],
    ),
    "two chats share the system prompt and keep their own tails": (
        64,
        [([*range(12), *A], 0), ([*range(12), *B], 12), ([*range(12), *A, 0], 16), ([*range(12), *B, 0], 16)],
    ),
    "room for three blocks keeps the last three of four": (3, [(A, 0), (B, 0), (TAIL, 0), ([9] * 4, 0), ([*B, 0], 4)]),
    "the first of four is the one that has gone": (3, [(A, 0), (B, 0), (TAIL, 0), ([9] * 4, 0), ([*A, 0], 0)]),
    "a freed chain of three blocks loses its tail first": (3, [(range(12), 0), ([99], 0), (range(9), 8)]),
    "a hit makes a prefix young again": (
        4,
        [([*A, 0], 0), ([*TAIL, 0], 0), ([*A, 1], 4), (range(20, 32), 0), ([*A, 2], 4), ([*TAIL, 2], 0)],
    ),
    "a recycled block has no stale entry": (2, [([*A, 0], 0), ([*TAIL, 0], 0), ([*A, 0], 0)]),
    "under pressure only the blocks that are needed go, not the cache": (
        8,
        [(range(32), 0), ([99], 0), (range(29), 28)],
    ),
}
"""Blocks of the pool, and prompts, one after the other, with the number of tokens that are cached."""


@pytest.mark.usefixtures("every_hash")
@pytest.mark.parametrize(("capacity", "prompts"), EXAMPLES.values(), ids=EXAMPLES)
def test_what_is_cached_of_each_prompt(capacity: int, prompts: list[tuple[Sequence[int], int]]) -> None:
    worker = Desk(capacity + 1)
    cached = [worker.serve(f"s{number}", list(prompt)) for number, (prompt, _) in enumerate(prompts)]
    assert cached == [expected for _, expected in prompts]


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_a_full_hit_still_computes_one_token(block_size: int) -> None:
    """Otherwise nothing is left to compute, and there are no logits."""
    for length in range(1, 14):
        worker = Desk(block_size=block_size)
        worker.serve("first", range(length))
        assert worker.serve("second", range(length)) == (length - 1) // block_size * block_size
