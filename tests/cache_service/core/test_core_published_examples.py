"""The published experiment and worked examples, literally: block size 4, max_tokens=1, under good and bad hashes."""

from __future__ import annotations

import pytest

from kvpool.cache_service.core.block_pool import State
from tests.cache_service.core.desk import Desk

pytestmark = pytest.mark.usefixtures("every_hash")


def characters(text: str) -> list[int]:
    """One token per character."""
    return [ord(character) for character in text]


def test_an_18_token_prompt_has_16_tokens_cached_the_second_time() -> None:
    """Four sealed blocks serve the repetition, which leaves no duplicates behind; the tail of two tokens is nobody's hit."""
    worker = Desk()
    prompt = list(range(100, 118))
    assert worker.serve("first", prompt) == 0
    assert worker.counts.cached == 4
    assert worker.serve("second", prompt) == 16
    assert worker.counts.cached == 4
    assert worker.manager.num_prefix_nodes == 4


def test_hello_world_cat_and_dog_share_three_blocks() -> None:
    """A common prefix of twelve tokens is three blocks, whatever follows."""
    worker = Desk()
    first = worker.grant("cat", characters("Hello world cat"))
    assert worker.report("cat") is not None
    second = worker.grant("dog", characters("Hello world dog"))
    assert second.num_cached_tokens == 12
    assert second.blocks[:3] == first.blocks[:3]
    assert second.blocks[3] != first.blocks[3]


def test_equal_blocks_behind_different_prefixes_are_two_entries() -> None:
    """ "the mat.!" behind a cat is not "the mat.!" behind a dog: a block is its tokens and everything before them."""
    worker = Desk()
    cat, dog, tail = [1, 2, 3, 4], [1, 9, 3, 4], [5, 6, 7, 8]
    assert worker.serve("cat", cat + tail) == 0
    assert worker.serve("dog", dog + tail) == 0
    assert worker.counts.cached == 4
    assert worker.manager.num_prefix_nodes == 4
    assert worker.serve("cat again", [*cat, *tail, 0]) == 8
    assert worker.serve("dog again", [*dog, *tail, 0]) == 8


def test_prompts_of_22_and_20_tokens_with_nothing_in_common_seal_5_blocks_each() -> None:
    """Neither hits the other, and a third request hits either set."""
    worker = Desk()
    first, second = list(range(22)), list(range(500, 520))
    assert worker.serve("first", first) == 0
    assert worker.counts.cached == 5
    assert worker.serve("second", second) == 0
    assert worker.counts.cached == 10
    assert worker.serve("third", [*first[:20], 7]) == 20
    assert worker.serve("fourth", [*second, 7]) == 20


def test_room_for_three_cached_blocks_keeps_exactly_the_last_three() -> None:
    """Eviction takes the least recently used: of four unrelated one-block prompts the first is gone."""
    worker = Desk(num_blocks=4)
    prompts = [[10 * i + j for j in range(4)] for i in range(4)]
    for i, prompt in enumerate(prompts):
        assert worker.serve(f"s{i}", prompt) == 0
    pool = worker.session.pools[0]
    held = {tuple(node.tokens[::4]) for block in range(1, 4) if (node := pool.node(block)) is not None}
    assert held == {tuple(prompt) for prompt in prompts[1:]}
    assert pool.num_evicted == 1


def test_a_freed_chain_of_three_blocks_loses_its_tail_first() -> None:
    """A prefix outlives its continuations: pressure of one block costs the chain its last block."""
    worker = Desk(num_blocks=4)
    chain = list(range(12))
    worker.serve("chain", chain)
    assert worker.counts.cached == 3
    worker.serve("other", [99])
    assert worker.counts.cached == 2
    assert worker.grant("again", chain[:9]).num_cached_tokens == 8


def test_a_block_that_differs_early_spoils_everything_behind_it() -> None:
    """A = [1..8], B = A + [9, 10], C = [0, 2, …, 8, 9, 10]: B reuses both of A's blocks, C none."""
    worker = Desk()
    a = list(range(1, 9))
    table = worker.grant("a", a).blocks
    worker.report("a")
    b = worker.grant("b", [*a, 9, 10])
    assert b.num_cached_tokens == 8
    assert b.blocks[:2] == table
    c = worker.grant("c", [0, *a[1:], 9, 10])
    assert c.num_cached_tokens == 0
    assert not set(c.blocks) & set(b.blocks)


def test_two_chats_share_three_blocks_and_keep_their_own_tails() -> None:
    """Two chats of four blocks, three equal: ref counts 2, 2, 2 and own tails with 1."""
    worker = Desk()
    system = list(range(12))
    worker.grant("one", [*system, 20, 21, 22, 23])
    worker.report("one")
    worker.grant("two", [*system, 30, 31, 32, 33])
    worker.report("two")
    one, two = worker.table("one"), worker.table("two")
    pool = worker.session.pools[0]
    assert one[:3] == two[:3]
    assert one[3] != two[3]
    assert [pool.ref_count(block) for block in one] == [2, 2, 2, 1]
    assert [pool.ref_count(block) for block in two] == [2, 2, 2, 1]
    assert worker.counts.shared == 3
    assert all(pool.state(block) is State.HELD for block in one + two)
