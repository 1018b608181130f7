"""KV waste, from block maps that are known."""

from __future__ import annotations

import pytest

from kvpool.client.block_map import BlockMap
from kvpool.load.waste import WasteSample, summarise, waste_of
from kvpool.v1 import cache_pb2, common_pb2

HELD, CACHED = cache_pb2.BLOCK_STATE_HELD, cache_pb2.BLOCK_STATE_CACHED
RESERVED, FREE = cache_pb2.BLOCK_STATE_RESERVED, cache_pb2.BLOCK_STATE_FREE


def block(
    state: cache_pb2.BlockState, index: int = 0, *owners: str, sealed: bool = False, token_count: int = 0
) -> cache_pb2.BlockDescription:
    return cache_pb2.BlockDescription(
        state=state,
        table_index=index,
        sealed=sealed,
        token_count=token_count,
        ref_count=len(owners),
        owners=[common_pb2.SequenceKey(sequence_id=owner, attempt=1) for owner in owners],
    )


def waste(lengths: dict[str, int], *blocks: cache_pb2.BlockDescription) -> WasteSample:
    """On a worker of block size 16."""
    return waste_of(BlockMap("w", 16, 1 + len(blocks), blocks), lengths)


def test_the_end_of_the_last_block_is_waste() -> None:
    found = waste({"a": 40}, *(block(HELD, index, "a", sealed=index < 2) for index in range(3)))
    assert found == WasteSample(48, 40, 0)


def test_a_prompt_s_slots_are_assigned_before_they_are_computed() -> None:
    assert waste({"a": 40}, *(block(HELD, index, "a") for index in range(3))) == WasteSample(48, 40, 0)


def test_shared_blocks_count_once() -> None:
    found = waste(
        {"a": 20, "b": 30},
        block(HELD, 0, "a", "b", sealed=True),
        block(HELD, 1, "a"),
        block(HELD, 1, "b"),
    )
    assert found == WasteSample(48, 16 + 4 + 14, 0)


def test_free_and_cached_blocks_are_nobody_s() -> None:
    assert waste({}, block(FREE), block(CACHED, sealed=True)) == WasteSample(0, 0, 0)


def test_a_block_taken_out_of_the_reserve_is_held_and_the_rest_is_told_beside() -> None:
    """The manager does not know yet that the sequence has grown into a second block."""
    found = waste({"a": 18}, block(HELD, 0, "a"), block(RESERVED), block(RESERVED))
    assert found == WasteSample(32, 18, 16)


def test_a_sequence_never_takes_more_than_there_is_in_the_reserve() -> None:
    """A length that was noted after the map was read may be ahead of it."""
    found = waste({"a": 40}, block(HELD, 0, "a"), block(RESERVED))
    assert found == WasteSample(32, 32, 0)


def test_of_other_people_s_sequences_the_manager_s_counts_are_taken() -> None:
    found = waste({}, block(HELD, 0, "x", sealed=True, token_count=16), block(HELD, 1, "x", token_count=5))
    assert found == WasteSample(32, 21, 0)


def test_samples_count_by_what_was_held() -> None:
    found = summarise([WasteSample(100, 90, 50), WasteSample(300, 300, 50), WasteSample(0, 0, 50)])
    assert found is not None
    assert found._asdict() == pytest.approx({"num_samples": 2, "waste": 10 / 400, "waste_max": 0.1, "reserve": 0.25})
    assert summarise([WasteSample(0, 0, 50)]) is None
