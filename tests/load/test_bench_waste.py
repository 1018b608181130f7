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


SEALED = [block(HELD, index, "a", sealed=index < 2) for index in range(3)]
SHARED = [block(HELD, 0, "a", "b", sealed=True), block(HELD, 1, "a"), block(HELD, 1, "b")]
OTHERS = [block(HELD, 0, "x", sealed=True, token_count=16), block(HELD, 1, "x", token_count=5)]


@pytest.mark.parametrize(
    ("lengths", "blocks", "expected"),
    [
        pytest.param({"a": 40}, SEALED, WasteSample(48, 40, 0), id="the end of the last block is waste"),
        pytest.param(
            {"a": 40},
            [block(HELD, index, "a") for index in range(3)],
            WasteSample(48, 40, 0),
            id="the slots of a prompt are assigned before they are computed",
        ),
        pytest.param({"a": 20, "b": 30}, SHARED, WasteSample(48, 16 + 4 + 14, 0), id="shared blocks count once"),
        pytest.param({}, [block(FREE), block(CACHED, sealed=True)], WasteSample(0, 0, 0), id="others hold nothing"),
        pytest.param(
            {"a": 18},
            [block(HELD, 0, "a"), block(RESERVED), block(RESERVED)],
            WasteSample(32, 18, 16),
            id="the manager does not know yet that the sequence has taken a second block out of the reserve",
        ),
        pytest.param(
            {"a": 40},
            [block(HELD, 0, "a"), block(RESERVED)],
            WasteSample(32, 32, 0),
            id="a length that is ahead of the map takes no more than there is in the reserve",
        ),
        pytest.param({}, OTHERS, WasteSample(32, 21, 0), id="the manager counts the sequences of others"),
    ],
)
def test_waste_is_what_is_held_and_has_no_token(
    lengths: dict[str, int], blocks: list[cache_pb2.BlockDescription], expected: WasteSample
) -> None:
    """On a worker of block size 16."""
    assert waste_of(BlockMap("w", 16, 1 + len(blocks), tuple(blocks)), lengths) == expected


def test_samples_count_by_what_was_held() -> None:
    found = summarise([WasteSample(100, 90, 50), WasteSample(300, 300, 50), WasteSample(0, 0, 50)])
    assert found is not None
    assert found._asdict() == pytest.approx({"num_samples": 2, "waste": 10 / 400, "waste_max": 0.1, "reserve": 0.25})
    assert summarise([WasteSample(0, 0, 50)]) is None
