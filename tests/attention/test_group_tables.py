"""Tables of several groups: what a step may read is what the cache gave, whatever became of the entries before the window."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from kvpool.worker_service.attention.layout import BlockGroup, PackingError
from kvpool.worker_service.attention.packing import Packer, Packing, Staging, StepSizes, pack
from tests.attention.part import Part

CPU = torch.device("cpu")
SIZE = 4
GROUPS = (BlockGroup(300), BlockGroup(80, 9), BlockGroup(40, 5))


class Sequence:
    """As the cache holds one: a table in each group, whose blocks leave with the window and may come back at its end."""

    def __init__(self, free: list[list[int]], dice: random.Random) -> None:
        self.tables: tuple[list[int], ...] = tuple([] for _ in GROUPS)
        self.num_gone = [0] * len(GROUPS)
        self.computed = 0
        self._free, self._dice = free, dice

    def part(self, length: int) -> Part:
        start = self.computed
        for index, group in enumerate(GROUPS):
            self._let_go(index, group.first_block(start, SIZE))
            while len(self.tables[index]) * SIZE < start + length:
                self.tables[index].append(self._free[index].pop())
        self.computed += length
        tokens = [self._dice.randrange(1000) for _ in range(length)]
        return Part(tokens, start, self.tables)

    def _let_go(self, index: int, first: int) -> None:
        table, gone = self.tables[index], self.num_gone[index]
        for entry in range(gone, min(first, len(table))):
            self._free[index].append(table[entry])
            if self._dice.random() < 0.7:  # the others keep the block that was there
                table[entry] = 0
        self.num_gone[index] = max(gone, min(first, len(table)))

    def end(self) -> None:
        for index, table in enumerate(self.tables):
            self._free[index] += table[self.num_gone[index] :]


def check(packing: Packing, parts: list[Part]) -> None:
    """What a step reads of the device and on the host, from the first block that it may read."""
    ends = [part.start + len(part.token_ids) for part in parts]
    width = -(-max(ends) // SIZE)
    for index, group in enumerate(GROUPS):
        gathered = packing.gather_tables(width, index).tolist()
        slots: list[int] = []
        for number, (part, end) in enumerate(zip(parts, ends, strict=True)):
            table, first = part.block_tables[index][: -(-end // SIZE)], group.first_block(part.start, SIZE)
            assert gathered[number][first : len(table)] == table[first:]
            assert not any(gathered[number][:first])
            seen = 0 if group.window is None else max(0, part.start + 1 - group.window)
            wanted = [table[position // SIZE] * SIZE + position % SIZE for position in range(seen, end)]
            assert packing.slots(number, seen, end, index).tolist() == wanted
            slots += wanted[part.start - seen :]
        assert packing.groups[index].slot_mapping.tolist() == slots
    assert packing.position_ids[0].tolist() == [
        p for part, end in zip(parts, ends, strict=True) for p in range(part.start, end)
    ]
    assert packing.input_ids[0].tolist() == [token for part in parts for token in part.token_ids]


@pytest.mark.parametrize("seed", range(12))
def test_histories(seed: int) -> None:
    """Sequences come, are computed in chunks, decode together, and go; there are more of them than rows."""
    dice = random.Random(seed)
    free = [list(range(1, group.num_blocks)) for group in GROUPS]
    for each in free:
        dice.shuffle(each)
    packer = Packer(SIZE, GROUPS, CPU, StepSizes(dice.randrange(1, 4), max_blocks_per_seq=dice.randrange(1, 8)))
    running: list[Sequence] = []
    num_kept = 0
    for _ in range(60):
        if len(running) < 4 and dice.random() < 0.4:
            running.append(Sequence(free, dice))
        if running and dice.random() < 0.08:
            running.pop(dice.randrange(len(running))).end()
        chosen = dice.sample(running, dice.randint(0, len(running)))
        length = dice.choice([1, 1, 3, 11])
        for _ in range(dice.randrange(1, 12) if length == 1 else 1):
            if not chosen or any(sequence.computed > 130 for sequence in chosen):
                break
            parts = [sequence.part(length) for sequence in chosen]
            before = packer._layout
            packing = packer.pack(parts)
            num_kept += packing.layout is before
            check(packing, parts)
            check(pack(parts, SIZE, GROUPS, CPU), parts)
    assert num_kept > 10


def ring(*, holes: bool) -> tuple[Packer, list[int], list[int], Callable[[int], Packing]]:
    """A sequence in a full group and in one with a window of 5, whose table has turned once; and its decodes."""
    full, window = [1, 2, 3, 4], [0 if holes else 3, 2, 4, 3]
    packer = Packer(SIZE, (BlockGroup(20), BlockGroup(20, 5)), CPU, StepSizes(4, 16, 16))

    def decode(start: int) -> Packing:
        return packer.pack([Part([start], start, (full, window))])

    return packer, full, window, decode


@pytest.mark.parametrize("holes", [True, False])
def test_decodes_keep_their_layout_while_a_ring_turns(holes: bool) -> None:
    _, full, window, decode = ring(holes=holes)
    layout = decode(13).layout
    assert decode(14).layout is layout
    full.append(7)
    window[1] = 0 if holes else window[1]
    window.append(2)  # the block of entry 1, which is gone, comes back
    packing = decode(16)
    assert packing.layout is layout
    assert packing.groups[1].slot_mapping.tolist() == [2 * SIZE]
    assert packing.groups[0].slot_mapping.tolist() == [7 * SIZE]
    assert packing.slots(0, 12, 17, 1).tolist() == [12, 13, 14, 15, 8]
    assert packing.gather_tables(5, 1).tolist() == [[0, 0, 0, 3, 2]]


def test_a_block_within_the_window_that_changes_ends_the_layout() -> None:
    _, _, window, decode = ring(holes=True)
    layout = decode(13).layout
    window[2] = 9
    packing = decode(14)
    assert packing.layout is not layout
    assert packing.slots(0, 10, 15, 1).tolist() == [38, 39, 12, 13, 14]


@pytest.mark.parametrize("lays_out_again", [True, False])
def test_going_back_to_an_earlier_token_checks_and_reads_what_that_one_sees(lays_out_again: bool) -> None:
    """The earlier token sees a block that the later one does not, and that was neither checked nor sent for the later one."""
    full, window = [1, 2, 3, 4], [0, 0, 5, 6]
    packer = Packer(SIZE, (BlockGroup(20), BlockGroup(20, 6)), CPU, StepSizes(4, 16, 16))
    late, early = Part([1], 15, (full, window)), Part([1] * (2 if lays_out_again else 1), 12, (full, window))
    packer.pack([late])  # sees 10 … 15: entries 2 and 3
    with pytest.raises(PackingError, match="outside 1 … 19"):
        packer.pack([early])  # sees 7 … 12
    packer.pack([late])
    window[1] = 7
    packing = packer.pack([early])
    assert packing.slots(0, 7, 13, 1).tolist() == [31, 20, 21, 22, 23, 24]
    assert packing.gather_tables(4, 1).tolist() == [[0, 7, 5, 6]]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (([1, 2, 3, 4],), "part 0 has 1 block tables, the model has 2 groups"),
        (([1, 2, 3, 4], [1, 2, 3, 4], [1]), "part 0 has 3 block tables"),
        (([0, 2, 3, 4], [1, 2, 3, 4]), "outside 1 … 19: "),  # full attention keeps all
        (([1, 2, 3, 4], [0, 0, 0, 4]), "outside 1 … 9: "),  # within the window of position 13
        (([1, 2, 3, 4], [0, 0, 3, 10]), "outside 1 … 9: "),
        (([1, 2, 3, 4], [0, 0, 3]), "needs 4 blocks of 4 tokens, its table has 3"),
    ],
)
def test_refuses_in_each_group(tables: tuple[list[int], ...], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        pack([Part([1], 13, tables)], SIZE, (BlockGroup(20), BlockGroup(10, 5)), CPU)


def test_one_writer_is_asked_for_in_each_group() -> None:
    groups = (BlockGroup(20), BlockGroup(20, 5))
    parts = [Part([1], 4, ([1, 2], [1, 2])), Part([1], 4, ([3, 4], [3, 2]))]
    with pytest.raises(PackingError, match="same slot"):
        pack(parts, SIZE, groups, CPU)


def test_a_refused_step_changes_no_group() -> None:
    packer, full, window, decode = ring(holes=True)
    decode(15)
    before = [tables.tensor.clone() for tables in packer.block_tables]
    full.append(8)
    window.append(99)
    for parts in ([Part([1], 16, (full, window))], [Part([1], 0, ([9], [9])), Part([1], 16, (full, window))]):
        with pytest.raises(PackingError, match="outside"):
            packer.pack(parts)
        assert all(torch.equal(tables.tensor, old) for tables, old in zip(packer.block_tables, before, strict=True))


def test_groups_with_a_window_share_no_prefix() -> None:
    """Holes at the beginning of two tables are no blocks that both have."""
    full = ([1, 2, 3, 4], [1, 2, 3, 5])
    parts = [Part([1], 13, (full[0], [0, 0, 3, 4])), Part([1], 13, (full[1], [0, 0, 3, 5]))]
    packing = pack(parts, SIZE, (BlockGroup(20), BlockGroup(20, 5)), CPU)
    (found,) = packing.shared_prefixes(1, 8, 0)
    assert found.num_blocks == 3
    assert packing.shared_prefixes(1, 8, 1) == []


def test_changes_are_written_where_the_host_cannot_write_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: also when a step appends as many blocks as the step before it, so that what is sent has the same lengths."""
    packer = Packer(SIZE, (BlockGroup(40), BlockGroup(40, 9)), CPU, StepSizes(4, 16, 16))
    for tables in packer.block_tables:
        monkeypatch.setattr(tables, "_shared", None)
    one, other = ([1], [1]), ([2], [2])
    starts = {0: 2, 1: 1}
    for step in range(12):
        parts = []
        for number, own in enumerate((one, other)):
            start = starts[number] + step
            if start // SIZE == len(own[0]):
                for table in own:
                    table.append(10 + 2 * step + number)
            parts.append(Part([step], start, own))
        packing = packer.pack(parts)
        for index in range(2):
            gathered = packing.gather_tables(8, index).tolist()
            for number, part in enumerate(parts):
                last = part.start // SIZE
                assert gathered[number][last] == part.block_tables[index][last]
                assert gathered[number][max(0, last - 1)] == part.block_tables[index][max(0, last - 1)]


def test_nothing_is_taken_for_granted_in_any_group_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    packer, full, window, decode = ring(holes=True)
    decode(15)
    full.append(8)
    window.append(9)
    with monkeypatch.context() as broken:
        broken.setattr(Staging, "send", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            decode(16)
    for tables in packer.block_tables:
        tables.tensor.zero_()
    packing = decode(16)
    assert packing.gather_tables(5, 0).tolist() == [full]
    assert packing.gather_tables(5, 1).tolist() == [[0, 0, 0, 3, 9]]
