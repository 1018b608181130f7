"""The block tables on the device are the engine's, whatever the sequences did, and only what changed was written."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool.worker_service.attention.block_tables import BlockTables
from kvpool.worker_service.attention.layout import PackingError
from kvpool.worker_service.attention.packing import Packer, Packing, StepSizes, one_group, pack
from kvpool.worker_service.attention.staging import Staging
from tests.attention.part import Part

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 200
GROUPS = one_group(NUM_BLOCKS)
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def check(packing: Packing, parts: list[Part]) -> None:
    """Everything that a step reads of the device, by hand."""
    on_device = packing.on_device
    (tables,), (group,) = zip(*(part.block_tables for part in parts), strict=True), packing.groups
    width = max(map(len, tables))
    gathered = packing.gather_tables(min(width, group.block_tables.shape[1])).tolist()
    slots: list[int] = []
    positions: list[int] = []
    for index, part in enumerate(parts):
        end = part.start + len(part.token_ids)
        table = tables[index][: -(-end // BLOCK_SIZE)]
        assert gathered[index][: len(table)] == table
        assert packing.tables()[index] == table
        assert packing.layout.groups[0].arrays[index].tolist() == table
        assert packing.slots(index, 0, end).tolist() == [
            table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in range(end)
        ]
        assert (packing.offsets[index], packing.context_lens[index]) == (len(positions), end)
        positions += range(part.start, end)
        slots += packing.slots(index, part.start, end).tolist()
    assert group.slot_mapping.tolist() == slots
    assert packing.position_ids.tolist() == [positions]
    assert packing.input_ids.tolist() == [[token for part in parts for token in part.token_ids]]
    assert on_device.starts.tolist() == [part.start for part in parts]
    assert on_device.query_lens.tolist() == [len(part.token_ids) for part in parts]


class Sequence:
    """As the engine holds one: a table that grows, and what is computed."""

    def __init__(self, shared: list[int]) -> None:
        self.table = list(shared)
        self.num_computed = len(shared) * BLOCK_SIZE
        self.num_shared = len(shared)


class Histories(RuleBasedStateMachine):
    """An engine whose sequences come, share prefixes, grow, are preempted, and go, with more of them than there are rows."""

    @initialize(max_num_seqs=st.integers(1, 4), max_blocks_per_seq=st.integers(1, 4), seed=st.integers(0, 1 << 16))
    def start(self, max_num_seqs: int, max_blocks_per_seq: int, seed: int) -> None:
        self.dice = random.Random(seed)
        sizes = StepSizes(max_num_seqs, max_blocks_per_seq=max_blocks_per_seq)
        self.packer = Packer(BLOCK_SIZE, GROUPS, CPU, sizes)
        self.free = list(range(1, NUM_BLOCKS))
        self.dice.shuffle(self.free)
        self.sequences: list[Sequence] = []

    @rule(num_shared=st.integers(0, 5))
    def arrive(self, num_shared: int) -> None:
        if len(self.sequences) == 6:
            return
        shared: list[int] = []
        if self.sequences:
            other = self.dice.choice(self.sequences)
            shared = other.table[: min(num_shared, other.num_computed // BLOCK_SIZE)]
        self.sequences.append(Sequence(shared))

    @rule()
    def leave(self) -> None:
        if self.sequences:
            self._let_go(self.sequences.pop(self.dice.randrange(len(self.sequences))))

    @rule()
    def preempt(self) -> None:
        """Comes back in a later round: another table, in the same list or in a new one."""
        if not self.sequences:
            return
        index = self.dice.randrange(len(self.sequences))
        sequence = self.sequences[index]
        self._let_go(sequence)
        if self.dice.random() < 0.5:
            self.sequences[index] = Sequence([])
        else:
            sequence.table[:] = []
            sequence.num_computed = sequence.num_shared = 0

    @rule(most=st.integers(1, 6), chunk=st.integers(1, 11))
    def step(self, most: int, chunk: int) -> None:
        chosen = self.dice.sample(self.sequences, min(most, len(self.sequences)))
        parts: list[Part] = []
        for sequence in chosen:
            length = self.dice.choice([1, chunk])
            end = sequence.num_computed + length
            ahead = self.dice.randrange(3)  # the engine may hold more blocks than the step needs
            while len(sequence.table) * BLOCK_SIZE < end + ahead * BLOCK_SIZE:
                if not self.free:
                    return
                sequence.table.append(self.free.pop())
            tokens = [self.dice.randrange(1000) for _ in range(length)]
            parts.append(Part(tokens, sequence.num_computed, (sequence.table,)))
        if not parts:
            return
        self._run(chosen, parts)

    @rule(most=st.integers(1, 6), num_steps=st.integers(2, 2 * BLOCK_SIZE + 1), num_ahead=st.integers(0, 2))
    def decode(self, most: int, num_steps: int, num_ahead: int) -> None:
        """The same sequences, token after token. Their tables grow one at a time, and now and then the order changes."""
        chosen = self.dice.sample(self.sequences, min(most, len(self.sequences)))
        for _ in range(num_steps if chosen else 0):
            for sequence in chosen:
                while len(sequence.table) * BLOCK_SIZE <= sequence.num_computed + num_ahead * BLOCK_SIZE:
                    if not self.free:
                        return
                    sequence.table.append(self.free.pop())
            self._run(chosen, [Part([self.dice.randrange(1000)], s.num_computed, (s.table,)) for s in chosen])
            if self.dice.random() < 0.1:
                self.dice.shuffle(chosen)

    def _run(self, chosen: list[Sequence], parts: list[Part]) -> None:
        packing = self.packer.pack(parts)
        check(packing, parts)
        afresh = pack(parts, BLOCK_SIZE, GROUPS, CPU)
        for max_query_len in (1, 8):
            assert packing.shared_prefixes(BLOCK_SIZE, max_query_len) == afresh.shared_prefixes(
                BLOCK_SIZE, max_query_len
            )
        rows = packing.groups[0].rows.tolist()
        assert len(set(rows)) == len(rows)
        for sequence, part in zip(chosen, parts, strict=True):
            sequence.num_computed += len(part.token_ids)

    @rule()
    def refused(self) -> None:
        """A step that is refused changes nothing."""
        before = self.packer.block_tables[0].tensor.clone()
        with pytest.raises(PackingError):
            self.packer.pack([Part([1], 0, ([NUM_BLOCKS - 1],)), Part([1], 0, ([NUM_BLOCKS],))])
        assert torch.equal(self.packer.block_tables[0].tensor, before)

    @invariant()
    def the_host_knows_what_the_device_has(self) -> None:
        if not hasattr(self, "packer"):
            return
        tables = self.packer.block_tables[0]
        copy = torch.from_numpy(tables._copy)
        assert torch.equal(tables.tensor[copy > 0].long(), copy[copy > 0])

    def _let_go(self, sequence: Sequence) -> None:
        own = set(sequence.table[sequence.num_shared :])
        for other in self.sequences:
            if other is not sequence:
                own -= set(other.table)
        self.free.extend(sorted(own))
        self.dice.shuffle(self.free)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40)


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


@given(st.lists(st.lists(st.integers(-(1 << 62), 1 << 62), max_size=9), min_size=1, max_size=6))
def test_arrays_arrive_as_they_were_sent(arrays: list[list[int]]) -> None:
    staging = Staging(CPU)
    for _ in range(2):
        sent = staging.send([torch.tensor(array, dtype=torch.int64).numpy() for array in arrays])
        assert [tensor.tolist() for tensor in sent] == arrays


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
