"""The block map as a picture: every block has its cell, and every state can be read without colours."""

from __future__ import annotations

import pytest

from kvpool.cli.commands.block_map import render_block_map
from kvpool.client import Client, ClientConfig
from kvpool.client.block_map import BlockMap, fetch_block_map
from kvpool.v1 import cache_pb2, common_pb2
from tests.client.fakes import FakeManager, FakeWorker, serving

FREE, CACHED, HELD = cache_pb2.BLOCK_STATE_FREE, cache_pb2.BLOCK_STATE_CACHED, cache_pb2.BLOCK_STATE_HELD
RESERVED, COPYING = cache_pb2.BLOCK_STATE_RESERVED, cache_pb2.BLOCK_STATE_COPYING


def block(
    block_id: int, state: cache_pb2.BlockState, *owners: str, ref_count: int = 0, sealed: bool = True
) -> cache_pb2.BlockDescription:
    return cache_pb2.BlockDescription(
        block_id=block_id,
        state=state,
        ref_count=ref_count or len(owners),
        sealed=sealed,
        owners=[common_pb2.SequenceKey(sequence_id=owner, attempt=1) for owner in owners],
    )


def picture(*blocks: cache_pb2.BlockDescription, num_blocks: int, width: int = 80) -> list[str]:
    text = render_block_map(BlockMap("w", 4, num_blocks, blocks), width)
    return text.plain.splitlines()


def test_every_state_has_its_own_sign() -> None:
    """Null, shared by two, own, own unsealed, of another, cached, reserved, copying, free, shared by twelve."""
    lines = picture(
        block(1, HELD, "s1", "s2"),
        block(2, HELD, "s1"),
        block(3, HELD, "s1", sealed=False),
        block(4, HELD, "s2"),
        block(5, CACHED),
        block(6, RESERVED),
        block(7, COPYING),
        block(8, FREE),
        block(9, HELD, "s1", ref_count=12),
        num_blocks=10,
    )
    assert lines[2] == "      0 ∅2AaB▒+~·#"


def test_the_counts_leave_the_null_block_out() -> None:
    lines = picture(block(0, FREE), block(1, HELD, "s1", "s2"), block(2, HELD, "s1"), block(3, CACHED), num_blocks=4)
    assert lines[0] == "w: 4 blocks of 4 tokens"
    assert lines[1].strip() == "0 free, 1 cached, 2 held (1 shared)"


def test_the_legend_names_the_owners_and_explains_only_what_is_there() -> None:
    lines = picture(block(1, HELD, "first"), block(2, HELD, "first", "second"), num_blocks=3)
    legend = "\n".join(lines[3:])
    assert "A first: 2 blocks" in legend
    assert "B second: 1 block" in legend
    assert "reserved" not in legend
    assert "reserved" in "\n".join(picture(block(1, RESERVED), num_blocks=2))


def test_equal_rows_of_a_large_pool_are_one_line() -> None:
    blocks = [block(i, FREE) for i in range(1, 100_000)]
    blocks[70_000] = block(70_001, CACHED)
    lines = picture(*blocks, num_blocks=100_000)
    assert len(lines) < 12
    assert any("▒" in line and line.split()[0] == str(70_001 // 64 * 64) for line in lines)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_picture_fits_its_width_and_owned_rows_are_never_folded(width: int) -> None:
    lines = picture(*(block(i, HELD, "s") for i in range(1, 640)), num_blocks=640, width=width)
    assert max(len(line) for line in lines) <= width
    rows = [line.split()[1] for line in lines if "AAAA" in line]
    assert sum(map(len, rows)) == 640


async def test_a_large_pool_is_fetched_page_by_page() -> None:
    """4,096 blocks a page: a message stays small however large the pool is."""
    manager = FakeManager([FakeWorker("w")])
    manager.num_blocks = 10_000
    manager.blocks = [block(i, FREE) for i in range(1, 10_000)]
    async with serving(manager), Client(config=ClientConfig(manager=manager.address)) as client:
        block_map = await fetch_block_map(client, "w")
    assert [b.block_id for b in block_map.blocks] == list(range(1, 10_000))
    assert [request.first_block for request in manager.describes] == [0, 4096, 8192]
