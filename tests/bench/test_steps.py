"""The steps that bench.step_profile and bench.neighbours measure."""

from __future__ import annotations

from bench.steps import BLOCK_SIZE, step


def test_sequences_share_the_blocks_of_their_prefix_and_no_other() -> None:
    num_before = 5 * BLOCK_SIZE
    parts = step(3, 2, num_before, num_shared=2 * BLOCK_SIZE).parts
    tables = [part.block_tables[0] for part in parts]
    assert [(part.start, len(part.token_ids)) for part in parts] == [(num_before, 2)] * 3
    assert [len(table) for table in tables] == [6] * 3  # two tokens begin a block
    assert [table[:2] for table in tables] == [[1, 2]] * 3
    own = [block for table in tables for block in table[2:]]
    assert len(set(own)) == len(own)
    assert min(own) == 3
