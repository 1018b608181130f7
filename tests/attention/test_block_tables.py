"""Block tables of one group and of several, and what a step makes of them: what it may read is what the cache gave, whatever became
of the entries before a window, only what changed is written, and nothing outside a sequence's blocks is read or written.
Parts of a step that share leading blocks are found."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from kvpool.worker_service.attention.block_tables import BlockTables
from kvpool.worker_service.attention.layout import BlockGroup, PackingError
from kvpool.worker_service.attention.packing import Packer, Packing, Staging, StepSizes, pack
from kvpool.worker_service.attention.shared_prefix import SharedPrefix, find_shared_prefixes
from kvpool.worker_service.step import SequencePart as Part

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
SIZE = 4
ONE = (BlockGroup(200),)
RING = (BlockGroup(20), BlockGroup(20, 5))
SEVERAL = (BlockGroup(300), BlockGroup(80, 9), BlockGroup(40, 5))


def check(packing: Packing, parts: list[Part], groups: tuple[BlockGroup, ...] = ONE) -> None:
    """What a step reads of the device and on the host, from the first block that it may read."""
    ends = [part.start + len(part.token_ids) for part in parts]
    width = -(-max(ends) // SIZE)
    for index, group in enumerate(groups):
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
            if group.window is None:
                assert packing.layout.groups[index].arrays[number].tolist() == table
        assert packing.groups[index].slot_mapping.tolist() == slots
    tables = packing.layout.groups[0].tables
    assert tables == [part.block_tables[0][: -(-end // SIZE)] for part, end in zip(parts, ends, strict=True)]
    positions = [range(part.start, end) for part, end in zip(parts, ends, strict=True)]
    assert packing.position_ids[0].tolist() == [position for each in positions for position in each]
    assert packing.input_ids[0].tolist() == [token for part in parts for token in part.token_ids]
    assert packing.starts_there.tolist() == [part.start for part in parts]
    assert packing.query_lens_there.tolist() == [len(part.token_ids) for part in parts]
    assert list(packing.context_lens) == ends
    assert list(packing.offsets)[: len(parts)] == [sum(map(len, positions[:number])) for number in range(len(parts))]


@pytest.mark.parametrize("device", DEVICES)
def test_on_every_device(device: str) -> None:
    parts = [Part([11, 12, 13], 3, ([5, 2, 9],)), Part([21], 0, ([1],))]
    check(pack(parts, SIZE, ONE, torch.device(device)), parts)


# -- only what changed is written


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


# -- steps that keep their layout


def decodes(*tables: list[int], start: int) -> list[Part]:
    return [Part([start], start, (table,)) for table in tables]


def test_decodes_of_the_same_sequences_keep_their_layout() -> None:
    """Also when a table grows; and tables of which only the last block differs in length are not compared with those of others."""
    packer = Packer(SIZE, ONE, CPU, StepSizes(4, 16, 8))
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
    ("table", "parts"),
    [
        pytest.param([1, 2, 11], [(1, 7, 1), (0, 7, 1)], id="order"),
        pytest.param([1, 2, 11], [(0, 7, 1)], id="one less"),
        pytest.param([1, 2, 11], [(0, 7, 1), (1, 7, 1), (2, 7, 1)], id="one more"),
        pytest.param([1, 2, 11], [(3, 7, 1), (1, 7, 1)], id="another list"),
        pytest.param([9, 2, 11], [(0, 7, 1), (1, 7, 1)], id="another block"),
        pytest.param([1, 2, 11], [(0, 7, 2), (1, 7, 1)], id="two tokens"),
        pytest.param([1, 2, 11, 13], [(0, 12, 1), (1, 7, 1)], id="two blocks more"),
        pytest.param([1, 2, 11], [(0, 3, 1), (1, 7, 1)], id="back"),
    ],
)
def test_no_other_step_keeps_the_layout(table: list[int], parts: list[tuple[int, int, int]]) -> None:
    """table: what that of the first sequence has become. parts: index of the table, start, number of tokens."""
    packer = Packer(SIZE, ONE, CPU, StepSizes(4, 16, 4))
    tables = [[1, 2, 11], [3, 4, 12], [7, 8], [1, 2, 11]]
    layout = packer.pack(decodes(*tables[:2], start=6)).layout
    tables[0][:] = table
    changed = [Part([7] * count, start, (tables[index],)) for index, start, count in parts]
    packing = packer.pack(changed)
    assert packing.layout is not layout
    check(packing, changed)


def test_a_block_more_must_be_there_and_have_room_in_the_block_tables() -> None:
    packer, table = Packer(SIZE, ONE, CPU, StepSizes(4, 16, 3)), [1, 2, 11]
    layout = packer.pack(decodes(table, start=11)).layout
    with pytest.raises(PackingError, match="its table has 3"):
        packer.pack(decodes(table, start=12))
    table.append(13)
    packing = packer.pack(decodes(table, start=12))
    assert packing.layout is not layout
    check(packing, decodes(table, start=12))


def ring(*, holes: bool) -> tuple[Packer, list[int], list[int], Callable[[int], Packing]]:
    """A sequence in a full group and in one with a window of 5, whose table has turned once; and its decodes."""
    full, window = [1, 2, 3, 4], [0 if holes else 3, 2, 4, 3]
    packer = Packer(SIZE, RING, CPU, StepSizes(4, 16, 16))

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


def test_buffers_are_used_again() -> None:
    packer = Packer(SIZE, ONE, CPU, StepSizes(2, 16, 4))
    packings = [packer.pack([Part(list(range(length)), 0, ([1, 2, 3],))]) for length in (10, 1, 12, 1)]
    for alike in (packings[::2], packings[1::2]):
        for name in ("input_ids", "position_ids"):
            assert len({getattr(packing, name).data_ptr() for packing in alike}) == 1
        assert len({packing.groups[0].slot_mapping.data_ptr() for packing in alike}) == 1
    assert len({packing.groups[0].block_tables.data_ptr() for packing in packings}) == 1


def test_groups_with_a_window_share_no_prefix() -> None:
    """Holes at the beginning of two tables are no blocks that both have."""
    full = ([1, 2, 3, 4], [1, 2, 3, 5])
    parts = [Part([1], 13, (full[0], [0, 0, 3, 4])), Part([1], 13, (full[1], [0, 0, 3, 5]))]
    packing = pack(parts, SIZE, RING, CPU)
    (found,) = packing.shared_prefixes(1, 8, 0)
    assert found.num_blocks == 3
    assert packing.shared_prefixes(1, 8, 1) == []


# -- what is refused


@pytest.mark.parametrize(
    ("groups", "parts", "message"),
    [
        (ONE, [Part([], 0, ([1],))], "0 tokens"),
        (ONE, [Part([1], -1, ([1],))], "position -1"),
        (ONE, [Part([1] * 5, 0, ([1],))], "needs 2 blocks of 4 tokens, its table has 1"),
        (ONE, [Part([1], 0, ([0],))], "outside 1 … 199"),
        (ONE, [Part([1], 0, ([200],))], "outside 1 … 199"),
        (ONE, [Part([1], 4, ([-3, 2],))], "outside 1 … 199"),
        (ONE, [Part([1], 4, ([1, 2],)), Part([1], 4, ([3, 2],))], "same slot"),
        (RING, decodes([1, 2, 3, 4], start=13), "part 0 has 1 block tables, the model has 2 groups"),
        (RING, [Part([1], 13, ([1, 2, 3, 4], [1, 2, 3, 4], [1]))], "part 0 has 3 block tables"),
        (RING, [Part([1], 13, ([0, 2, 3, 4], [1, 2, 3, 4]))], "outside 1 … 19: "),  # full attention keeps all
        (RING, [Part([1], 13, ([1, 2, 3, 4], [0, 0, 0, 4]))], "outside 1 … 19: "),  # within the window of position 13
        (RING, [Part([1], 13, ([1, 2, 3, 4], [0, 0, 3, 20]))], "outside 1 … 19: "),
        (RING, [Part([1], 13, ([1, 2, 3, 4], [0, 0, 3]))], "needs 4 blocks of 4 tokens, its table has 3"),
        (
            RING,
            [Part([1], 13, ([1, 2, 3, 4], [1, 2, 3, 4])), Part([1], 13, ([5, 6, 7, 8], [5, 6, 7, 4]))],
            "same slot",
        ),
    ],
)
def test_refuses(groups: tuple[BlockGroup, ...], parts: list[Part], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        pack(parts, SIZE, groups, CPU)


@pytest.mark.parametrize("lays_out_again", [False, True])
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize(("block", "message"), [(0, "outside"), (20, "outside"), (12, "same slot")])
def test_a_refused_step_changes_no_group(lays_out_again: bool, group: int, block: int, message: str) -> None:
    """Two sequences decode; the next block of the first is one that it must not write."""
    packer = Packer(SIZE, RING, CPU, StepSizes(4, 16, 16))
    one, other = ([1, 2], [1, 2]), ([11, 12], [11, 12])
    packer.pack([Part([7], 7, one), Part([5], 5, other)])
    before = [tables.tensor.clone() for tables in packer.block_tables]
    one[group].append(block)
    one[1 - group].append(9)
    parts = [Part([8], 8, one), Part([6], 6, other)]
    with pytest.raises(PackingError, match=message):
        packer.pack(parts[::-1] if lays_out_again else parts)
    assert all(torch.equal(tables.tensor, old) for tables, old in zip(packer.block_tables, before, strict=True))
    one[group][-1] = 9
    check(packer.pack(parts), parts, RING)


@pytest.mark.parametrize("keeps_its_layout", [True, False])
def test_nothing_is_taken_for_granted_after_a_failure(keeps_its_layout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's copy is of what was sent; if sending fails, it may be wrong."""
    packer, full, window, decode = ring(holes=True)
    if keeps_its_layout:
        decode(15)
    full.append(8)
    window.append(9)
    with monkeypatch.context() as broken:
        broken.setattr(Staging, "send", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            decode(16)
    for tables in packer.block_tables:
        tables.tensor.zero_()
    check(decode(16), [Part([16], 16, (full, window))], RING)


# -- everything


class Sequence:
    """As the cache holds one: a table in each group, whose blocks leave with the window and may come back at its end."""

    def __init__(self, free: list[list[int]], dice: random.Random) -> None:
        self.tables: tuple[list[int], ...] = tuple([] for _ in SEVERAL)
        self.num_gone = [0] * len(SEVERAL)
        self.computed = 0
        self._free, self._dice = free, dice

    def part(self, length: int) -> Part:
        start = self.computed
        for index, group in enumerate(SEVERAL):
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


@pytest.mark.parametrize("host_writes", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_histories(seed: int, host_writes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences come, are computed in chunks, decode together, and go; there are more of them than rows. Also where the host cannot
    write the tables itself, as on a GPU."""
    dice = random.Random(seed)
    free = [list(range(1, group.num_blocks)) for group in SEVERAL]
    for each in free:
        dice.shuffle(each)
    packer = Packer(SIZE, SEVERAL, CPU, StepSizes(dice.randrange(1, 4), max_blocks_per_seq=dice.randrange(1, 8)))
    if not host_writes:
        for tables in packer.block_tables:
            monkeypatch.setattr(tables, "_shared", None)
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
            check(packing, parts, SEVERAL)
            check(pack(parts, SIZE, SEVERAL, CPU), parts, SEVERAL)
    assert num_kept > 10


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
