"""What holds for the blocks of a sequence in a group of any kind, one of which the product does not have."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

import pytest

from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache.groups.dense import DenseGroup, DenseTable
from kvpool.worker_service.cache.groups.group import Forked, Group, GroupGrant, GroupTable, Run, Sizes
from kvpool.worker_service.cache.groups.state import StateGroup
from kvpool.worker_service.cache.groups.unit import UnitGroup
from kvpool.worker_service.cache.groups.window import WindowGroup
from kvpool.worker_service.cache.ledger import DisagreementError
from kvpool.worker_service.cache.reserve import SpareBlock
from kvpool.worker_service.cache.sequence import CacheSequence

SIZE = 4
SIZES = Sizes(SIZE, 2, 8)
CACHE = Path(__file__).parents[2] / "worker_service" / "cache"


class EverySecondTable(DenseTable):
    """A block for every second block of tokens."""

    grows = is_attended = False

    def num_missing(self, num_computed_tokens: int, num_slots: int) -> int:
        return max(0, (-(-num_slots // SIZE) + 1) // 2 - len(self.table))

    def block_of(self, index: int) -> int:
        return 0 if index % 2 else self.table[index // 2]

    def num_for_fork(self, num_computed_tokens: int, num_to_come: int) -> int:
        """Nothing of it is shared."""
        return len(self.table)

    def fork(self, num_computed_tokens: int, spare: Sequence[SpareBlock]) -> Forked:
        table = EverySecondTable((), (), SIZE, 0)
        table.advance(0, 0, spare)
        return Forked(table, (), list(zip(self.table, table.table, strict=True)))


class EverySecondGroup(DenseGroup):
    """Layers that see every second block of a text."""

    table_type = EverySecondTable

    def take(self, ledger: object, granted: GroupGrant, text: object, sizes: Sizes) -> EverySecondTable:
        return EverySecondTable(granted.empty.blocks, granted.empty.generations, SIZE, len(granted.empty.blocks))


KINDS: dict[str, Group] = {
    "dense": DenseGroup(200),
    "window": WindowGroup(200, 9),
    "state": StateGroup(200, 8),
    "unit": UnitGroup(200, 40),
    "every second": EverySecondGroup(200),
}


class Subject:
    """One sequence, its table in one group, and the blocks of the pool."""

    def __init__(self, group: Group, random: Random) -> None:
        self.group, self.random = group, random
        self.ledger = group.ledger_type(group.num_blocks, 0)
        self.unused = list(range(1, group.num_blocks))
        self.sequence = CacheSequence(
            "s", 1, common_pb2.Root(), list(range(40)), max_new_tokens=60, num_encoder_tokens=10
        )
        taken = self.take(group.num_for(self.sequence, SIZES))
        empty = Run([one.block for one in taken], [one.generation for one in taken])
        for block in empty.blocks:
            self.ledger.use(block)
        self.table = group.take(self.ledger, GroupGrant(empty=empty), self.sequence, SIZES)
        self.num_computed = 0

    def take(self, count: int) -> list[SpareBlock]:
        """Blocks of the reserve."""
        return [SpareBlock(self.unused.pop(), self.random.randrange(1, 99)) for _ in range(count)]

    def advance(self) -> None:
        """A step on the grid, as it is for a model with a state."""
        end = self.num_computed + SIZES.grid_blocks * SIZE
        spare = self.take(self.table.num_missing(self.num_computed, end))
        self.table.advance(self.num_computed, end, spare)
        assert self.table.num_missing(self.num_computed, end) == 0
        self.num_computed = end

    def name(self) -> None:
        """Name what is at the present place, if the kind does so."""
        for _, scratch in self.scratches():
            boundary = self.num_computed // SIZE
            if scratch.has_window(boundary):
                scratch.name(boundary, self.take(scratch.num_to_replace(boundary, 5, is_prompt_done=False)))

    def scratches(self) -> list:  # type: ignore[type-arg]
        self.sequence.take([self.table])
        return self.sequence.scratches()

    def state(self) -> None:
        """A call, which is executed or not."""
        statement, dropped = self.table.state()
        assert not set(dropped) & set(self.table.blocks()), "what is dropped is not used any more"
        assert {entry.block for entry in statement.released}.isdisjoint(self.table.blocks())
        if self.random.random() < 0.5:
            self.table.acknowledge(statement)
            assert (self.table.has_news, self.table.num_unstated, self.table.from_reserve) == (False, 0, [])

    def stated(self) -> list[int]:
        """The blocks that a report names."""
        return [*(entry.block for entry in self.table.entries()), *(spare.block for spare in self.table.scratch())]

    def report(self) -> None:
        """Everything is stated."""
        dropped = self.table.acknowledge_all()
        assert (self.table.has_news, self.table.num_unstated) == (False, 0)
        assert not set(dropped) & set(self.table.blocks())
        assert not any(self.table.state()[0])
        assert sorted(self.table.blocks()) == sorted(self.stated()), "a report leaves nothing out"

    def check(self) -> None:
        blocks = list(self.table.blocks())
        assert len(blocks) == len(set(blocks)), "no block twice"
        assert set(self.stated()) <= set(blocks), "a report names what is used"
        indexes = [entry.table_index for entry in self.table.entries()]
        assert indexes == sorted(set(indexes))
        assert len(self.table.from_reserve) == self.table.num_unstated
        assert {block for block in self.table.table if block} <= set(blocks)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_every_kind_keeps_its_books(name: str, seed: int) -> None:
    subject = Subject(KINDS[name], Random(seed))
    for _ in range(10):
        subject.advance()
        subject.check()
        if subject.random.random() < 0.5:
            subject.name()
        subject.check()
        if subject.random.random() < 0.7:
            subject.state()
        subject.check()
    subject.report()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_fork_of_every_kind_has_its_own_blocks_and_those_that_it_shares(name: str, num_steps: int) -> None:
    subject = Subject(KINDS[name], Random(1))
    for _ in range(num_steps):
        subject.advance()
    subject.table.state()
    table, num_computed = subject.table, subject.num_computed
    before = list(table.blocks())
    spare = subject.take(table.num_for_fork(num_computed, 4))
    assert len(spare) <= max(subject.group.fork_blocks(SIZES), len(before) if name == "every second" else 0)
    fork, shared, copies = table.fork(num_computed, spare)
    assert list(table.blocks()) == before, "the parent keeps what it has"
    assert set(shared) <= set(before)
    assert sorted(fork.blocks()) == sorted({*shared, *(one.block for one in spare)})
    assert sorted(fork.from_reserve) == sorted(spare), "what a fork must give back"
    assert {source for source, _ in copies} <= set(before)
    assert {target for _, target in copies} <= {one.block for one in spare}


def test_a_grant_without_the_scratch_of_a_group_names_the_group() -> None:
    granted = cache_pb2.Granted(tables=[common_pb2.BlockRun(group=0), common_pb2.BlockRun(group=1)])
    text = CacheSequence("s", 1, common_pb2.Root(), [1] * 9, max_new_tokens=1)
    with pytest.raises(DisagreementError, match="was granted 0 blocks of group 1 as scratch, 3 are needed"):
        KINDS["window"].read(granted, 1, text, SIZES)


def _names(path: Path) -> Iterable[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_nothing_but_the_kinds_knows_a_kind() -> None:
    """The default of the settings is dense; the server makes the groups of a model's plan."""
    kinds = {path.stem for path in (CACHE / "groups").glob("*.py")} - {"__init__", "group", "scratch"}
    worker = CACHE.parent
    knowing = {
        str(path.relative_to(worker))
        for path in worker.rglob("*.py")
        if path.parent.name != "groups"
        and any(name.split(".")[-2] in kinds for name in _names(path) if "groups." in name)
    }
    assert knowing == {"cache/settings.py", "server.py", "model/memory/plan.py", "model/memory/split.py"}
    assert issubclass(EverySecondTable, GroupTable)
