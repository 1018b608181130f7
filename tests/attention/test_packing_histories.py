"""The block tables on the device are the engine's, whatever the sequences did before."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool.worker_service.attention.layout import PackingError
from kvpool.worker_service.attention.packing import Packer, StepSizes, pack
from kvpool.worker_service.attention.staging import Staging
from tests.attention.packed import BLOCK_SIZE, CPU, GROUPS, NUM_BLOCKS, check
from tests.attention.part import Part


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


@given(st.lists(st.lists(st.integers(-(1 << 62), 1 << 62), max_size=9), min_size=1, max_size=6))
def test_arrays_arrive_as_they_were_sent(arrays: list[list[int]]) -> None:
    staging = Staging(CPU)
    for _ in range(2):
        sent = staging.send([torch.tensor(array, dtype=torch.int64).numpy() for array in arrays])
        assert [tensor.tolist() for tensor in sent] == arrays
