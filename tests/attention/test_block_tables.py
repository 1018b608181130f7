"""The block tables on the device are the engine's, and only what changed was written."""

from __future__ import annotations

import pytest
import torch

from kvpool.worker_service.attention.block_tables import BlockTables
from kvpool.worker_service.attention.layout import PackingError
from kvpool.worker_service.attention.packing import Packer, Staging, StepSizes, pack
from tests.attention.packed import BLOCK_SIZE, CPU, GROUPS, NUM_BLOCKS, check
from tests.attention.part import Part

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def changes(tables: BlockTables, table: list[int], key: int, first: int = 0) -> list[tuple[int, int]]:
    """Places and values that are written when the table is placed."""
    placement = tables.place([table], [key], [first], tables.num_known([table], [key], [first]))
    places, blocks = placement.changes
    tables.tensor.view(-1)[torch.from_numpy(places)] = torch.from_numpy(blocks).int()
    return list(zip(places.tolist(), blocks.tolist(), strict=True))


def test_only_what_changes_is_written() -> None:
    tables = BlockTables(CPU, max_num_seqs=2, max_blocks_per_seq=8)
    first = changes(tables, [5, 6, 7], key=1)
    assert [value for _, value in first] == [5, 6, 7]
    assert changes(tables, [5, 6, 7], key=1) == []
    assert changes(tables, [5, 6], key=1) == []
    assert [value for _, value in changes(tables, [5, 6, 7, 9], key=1)] == [9]
    assert [value for _, value in changes(tables, [5, 8, 7, 9], key=1)] == [8]


def test_a_row_goes_to_another_sequence_when_none_is_free_the_longest_unused_first() -> None:
    tables = BlockTables(CPU, max_num_seqs=2, max_blocks_per_seq=2)
    changes(tables, [1], key=1)
    changes(tables, [2], key=2)
    changes(tables, [1], key=1)
    changes(tables, [3], key=3)
    assert sorted(tables.tensor[:, 0].tolist()) == [1, 3]
    assert changes(tables, [1], key=1) == []
    assert [value for _, value in changes(tables, [2], key=2)] == [2]


def test_what_a_row_held_for_another_sequence_is_not_written_again() -> None:
    """A sequence with the same prefix that takes over the row costs its own blocks."""
    tables = BlockTables(CPU, max_num_seqs=1, max_blocks_per_seq=4)
    changes(tables, [1, 2, 3], key=1)
    assert [value for _, value in changes(tables, [1, 2, 4], key=2)] == [4]


def test_nothing_is_taken_for_granted_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's copy is of what was sent; if sending fails, it may be wrong."""
    packer = Packer(BLOCK_SIZE, GROUPS, CPU, StepSizes(2, 1, 4))
    part = Part([1], 0, ([7],))
    with monkeypatch.context() as broken:
        broken.setattr(Staging, "send", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            packer.pack([part])
    check(packer.pack([part]), [part])


def decodes(*tables: list[int], start: int) -> list[Part]:
    return [Part([start], start, (table,)) for table in tables]


def test_decodes_of_the_same_sequences_keep_their_layout() -> None:
    """Also when a table grows; and tables of which only the last block differs in length are not compared with those of others."""
    packer = Packer(BLOCK_SIZE, GROUPS, CPU, StepSizes(4, 16, 8))
    one, other = [1, 2], [3, 4]
    first = packer.pack(decodes(one, other, start=6)).layout
    assert packer.pack(decodes(one, other, start=7)).layout is first
    other.append(6)
    one.append(5)
    parts = decodes(one, other, start=8)
    packing = packer.pack(parts)
    assert packing.layout is first
    check(packing, parts)


@pytest.mark.parametrize(
    "change",
    [
        "order", "one less", "one more", "another list", "another block", "two tokens", "two blocks more", "no block more",
        "back", "wider",
    ],
)  # fmt: skip
def test_no_other_step_keeps_the_layout(change: str) -> None:
    packer = Packer(BLOCK_SIZE, GROUPS, CPU, StepSizes(4, 16, 3))
    one, other, third = [1, 2, 11], [3, 4, 12], [7, 8]
    layout = packer.pack(decodes(one, other, start=6)).layout
    parts = decodes(one, other, start=7)
    if change == "order":
        parts = parts[::-1]
    elif change == "one less":
        parts = parts[:1]
    elif change == "one more":
        parts += decodes(third, start=7)
    elif change == "another list":
        parts[0] = Part([7], 7, (list(one),))
    elif change == "another block":
        one[0] = 9
    elif change == "two tokens":
        parts[0] = Part([7, 8], 7, (one,))
    elif change == "two blocks more":
        one.append(13)
        parts[0] = Part([7], 12, (one,))
    elif change == "no block more":
        with pytest.raises(PackingError, match="its table has 3"):
            packer.pack([Part([7], 12, (one,)), parts[1]])
        return
    elif change == "back":
        parts[0] = Part([7], 3, (one,))
    else:  # the block tables have no room for a fourth block
        layout = packer.pack([Part([7], 11, (one,))]).layout
        one.append(13)
        parts = [Part([7], 12, (one,))]
    packing = packer.pack(parts)
    assert packing.layout is not layout
    check(packing, parts)


@pytest.mark.parametrize(("block", "message"), [(0, "outside"), (NUM_BLOCKS, "outside"), (4, "same slot")])
def test_a_block_that_a_decode_must_not_write_is_refused_and_changes_nothing(block: int, message: str) -> None:
    packer = Packer(BLOCK_SIZE, GROUPS, CPU, StepSizes(4, 16, 8))
    one, other = [1, 2], [3, 4]
    packer.pack([Part([7], 7, (one,)), Part([5], 5, (other,))])
    before = packer.block_tables[0].tensor.clone()
    one.append(block)
    with pytest.raises(PackingError, match=message):
        packer.pack([Part([8], 8, (one,)), Part([6], 6, (other,))])
    assert torch.equal(packer.block_tables[0].tensor, before)
    one[-1] = 9
    parts = [Part([8], 8, (one,)), Part([6], 6, (other,))]
    check(packer.pack(parts), parts)


def test_a_failure_while_a_layout_is_kept_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    packer = Packer(BLOCK_SIZE, GROUPS, CPU, StepSizes(2, 1, 4))
    table = [7]
    packer.pack([Part([1], 3, (table,))])
    table.append(8)
    with monkeypatch.context() as broken:
        broken.setattr(Staging, "send", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            packer.pack([Part([1], 4, (table,))])
    packer.block_tables[0].tensor.zero_()
    check(packer.pack([Part([1], 4, (table,))]), [Part([1], 4, (table,))])


def test_buffers_are_used_again() -> None:
    """Steps that are no larger than the packer was made for lie in the same memory."""
    packer = Packer(BLOCK_SIZE, GROUPS, CPU, StepSizes(2, 16, 4))
    packings = [packer.pack([Part(list(range(length)), 0, ([1, 2, 3],))]) for length in (10, 1, 12, 1)]
    for alike in (packings[::2], packings[1::2]):
        for name in ("input_ids", "position_ids"):
            assert len({getattr(packing, name).data_ptr() for packing in alike}) == 1
        assert len({packing.groups[0].slot_mapping.data_ptr() for packing in alike}) == 1
    assert len({packing.groups[0].block_tables.data_ptr() for packing in packings}) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_on_every_device(device: str) -> None:
    parts = [Part([11, 12, 13], 3, ([5, 2, 9],)), Part([21], 0, ([1],))]
    check(pack(parts, BLOCK_SIZE, GROUPS, torch.device(device)), parts)
