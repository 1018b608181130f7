"""What every kind of group does, whatever it is: one history for all of them, and one for a kind that only this test has.

What is right for one kind alone is in test_core_windows.py and test_core_units.py.
"""

from __future__ import annotations

import ast
import random
from dataclasses import fields
from hashlib import sha256
from pathlib import Path

import pytest

from kvpool.cache_service import group_codec
from kvpool.cache_service.core import groups
from kvpool.cache_service.core.block_pool import State
from kvpool.cache_service.core.description import describe_block
from kvpool.cache_service.core.groups.dense import DenseSpec
from kvpool.cache_service.core.groups.group import SessionGroup
from kvpool.cache_service.core.groups.state import StateSpec
from kvpool.cache_service.core.groups.unit import UnitSpec
from kvpool.cache_service.core.groups.window import WindowSessionGroup, WindowSpec, WindowTable
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    AppendItem,
    ForkItem,
    Granted,
    GroupSpec,
    Layout,
    ReportedSequence,
    ReportedUnit,
    ReportPart,
    ReservedBlock,
    Root,
    SequenceUpdate,
    TableEntry,
    Uplink,
)
from kvpool.cache_service.core.sequence import Sequence
from kvpool.cache_service.core.session import Session
from kvpool.v1 import common_pb2
from tests.cache_service.core.every_second import EverySecondGroup, EverySecondSpec
from tests.cache_service.core.lockstep import FINGERPRINT, key, registration, token_bytes

SIZE, BLOCKS = 2, 25
DENSE, WINDOW = DenseSpec(BLOCKS), WindowSpec(BLOCKS, window_tokens=4, ring_blocks=3)
STATE, CROSS = StateSpec(BLOCKS, grid_tokens=2 * SIZE, scratch_blocks=2), UnitSpec(BLOCKS, max_encoder_tokens=6)
SECOND = EverySecondSpec(BLOCKS)
LAYOUTS: dict[str, tuple[GroupSpec, ...]] = {
    "dense": (DENSE,),
    "two dense": (DENSE, DENSE),
    "window": (DENSE, WINDOW),
    "window alone": (WINDOW,),
    "state before dense": (STATE, DENSE),
    "cross attention": (DENSE, CROSS),
    "every second block": (DENSE, SECOND),
    "all": (WINDOW, DENSE, CROSS, SECOND, STATE),
}
ROOTS = [Root(FINGERPRINT, input_digest=sha256(text.encode()).digest()) for text in ("one input", "another")]


class Worker:
    """It knows no kind, but how windows are named: what it states it reads off the manager."""

    def __init__(self, specs: tuple[GroupSpec, ...]) -> None:
        self.manager = CacheManager(1)
        plain = registration(num_blocks=(BLOCKS,) * len(specs), block_size=SIZE)
        self.introduction = plain._replace(layout=Layout(SIZE, specs))
        self.has_input = CROSS in specs
        self.register()

    def register(self, *, holds_state: bool = False) -> None:
        again = self.introduction.register_no + 1
        self.introduction = self.introduction._replace(register_no=again, holds_state=holds_state)
        self.number, self.call_no = self.manager.register(self.introduction, 0.0).session, 0

    @property
    def session(self) -> Session:
        return self.manager.worker("w1")

    def uplink(self) -> Uplink:
        self.call_no += 1
        return Uplink(self.number, self.call_no)

    def allocate(self, name: str, prompt: list[int], root: Root) -> Granted | None:
        item = AllocateItem(key(name), root, token_bytes(prompt), 1, True, num_encoder_tokens=6 * self.has_input)
        expected = self.manager.explain(root, item.tokens, "w1").workers[0]
        (outcome,), _ = self.manager.allocate(self.uplink(), [item])
        if not isinstance(outcome, Granted):
            return None
        assert outcome.num_cached_tokens == expected.num_cached_tokens
        assert outcome.encoder_cached == expected.encoder_cached
        return outcome

    def compute(self, sequence: Sequence) -> None:
        """The next block of the prompt, or what is left of it; then name what others can go on from."""
        num_tokens = min(sequence.num_tokens, sequence.num_computed_tokens + SIZE)
        bound = tuple(self._named(group, sequence, num_tokens // SIZE) for group in self.session.by_slot)
        update = SequenceUpdate(
            sequence.key, 0, b"", num_tokens, bound if any(bound) else (), encoder_computed=self.has_input
        )
        (outcome,), _ = self.manager.append(self.uplink(), [AppendItem(update)])
        assert not isinstance(outcome, Exception), outcome

    def _named(self, group: SessionGroup, sequence: Sequence, num_full: int) -> tuple[TableEntry, ...]:
        table = sequence.tables[group.slot]
        if not isinstance(group, WindowSessionGroup) or num_full not in sequence.boundaries:
            return ()
        assert isinstance(table, WindowTable)
        missing = [index for index in range(max(0, num_full - group.span), num_full) if index not in table.entries]
        pairs = zip(missing, table.scratch, strict=False)
        return tuple(TableEntry(index, block, group.pool.generation(block)) for index, block in pairs)

    def free(self, sequence: Sequence) -> None:
        self.manager.free(self.uplink(), [SequenceUpdate(sequence.key)])

    def fork(self, parent: Sequence, name: str) -> None:
        update = SequenceUpdate(key(name), parent.num_sealed * SIZE, b"", parent.num_sealed * SIZE)
        self.manager.fork(self.uplink(), [ForkItem(parent.key, parent.num_sealed, update)])

    def begin_again(self) -> None:
        """A new session, to which it reports its sequences."""
        session, units = self.session, {}
        reported = []
        for sequence in session.sequences.values():
            tables, scratch = [], []
            for group in session.by_slot:
                pool, unsealed = group.pool, group.unsealed(sequence) if group.is_dependent else ()
                entries = [TableEntry(i or 0, b, pool.generation(b)) for i, b in group.places(sequence)]
                tables.append(tuple(entry for entry in entries if entry.block not in unsealed))
                scratch.append(tuple(ReservedBlock(b, pool.generation(b)) for b in unsealed))
                if not group.holds_nodes and sequence.encoder_computed:
                    unit = tuple(ReservedBlock(entry.block, entry.generation) for entry in entries)
                    units[unit] = ReportedUnit(sequence.root.key[0], group.slot, unit)
            reported.append(
                ReportedSequence(
                    sequence.key,
                    sequence.root.key[0],
                    bytes(sequence.tokens),
                    sequence.num_computed_tokens,
                    sequence.num_cached_tokens,
                    tuple(tables),
                    tuple(scratch),
                    tuple(one * SIZE for one in sequence.boundaries),
                    sequence.encoder_computed,
                )
            )
        self.register(holds_state=True)
        part = ReportPart(0, True, sequences=tuple(reported), units=tuple(units.values()), live=True)
        self.manager.report(self.uplink(), part)

    def look(self) -> None:
        """Every law holds, and all that displays show of the groups fits together."""
        assert self.manager.check().violations == []
        for group in self.session.by_slot:
            of_sequences = [(one, set(group.blocks(one))) for one in self.session.sequences.values()]
            for sequence, blocks in of_sequences:
                assert {block for _, block in group.places(sequence)} == blocks
                assert all(group.pool.state(block) is State.HELD for block in blocks)
                assert {block for block in blocks if group.pool.node(block) is None} == set(group.unsealed(sequence))
                for index, block in group.places(sequence):
                    assert index is None or group.block_at(sequence, index) == block
            for block in range(1, BLOCKS):
                shown = describe_block(self.session, block, group.slot)
                assert set(shown.block.owners) == {one.key for one, blocks in of_sequences if block in blocks}
                assert not shown.prefix_blocks or shown.prefix_blocks[-1] == block


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kind_keeps_the_laws(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(groups.KINDS, EverySecondSpec, EverySecondGroup)
    draw, worker = random.Random(seed), Worker(LAYOUTS[name])
    for number in range(120):
        living = list(worker.session.sequences.values())
        what = draw.choice(["allocate", *["compute"] * 6, "free", "fork", "again"])
        if what == "allocate" or not living:
            prompt = [draw.randrange(2), *range(draw.randint(5, 9))]
            worker.allocate(str(number), prompt, draw.choice(ROOTS))
        elif what == "compute":
            worker.compute(draw.choice(living[:2]))
        elif what == "free":
            worker.free(draw.choice(living[:2]))
        elif what == "fork":
            parent = draw.choice(living)
            if parent.num_sealed and (parent.encoder_computed or not worker.has_input):
                worker.fork(parent, str(number))
        elif draw.random() < 0.3:
            before = [[set(g.places(one)) for g in worker.session.by_slot] for one in living]
            worker.begin_again()
            again = list(worker.session.sequences.values())
            assert [[set(g.places(one)) for g in worker.session.by_slot] for one in again] == before
        worker.look()
    for sequence in list(worker.session.sequences.values()):
        worker.free(sequence)
    prompt = list(range(4 * SIZE + 1))
    worker.allocate("first", prompt, ROOTS[0])
    while (first := worker.session.sequences["first", 1]).num_computed_tokens < len(prompt):
        worker.compute(first)
    worker.free(first)
    second = worker.allocate("second", prompt, ROOTS[0])
    assert second is not None
    assert second.num_cached_tokens == 4 * SIZE
    worker.look()
    worker.manager.deregister(worker.number)
    while worker.manager.sweep():
        pass
    assert (worker.manager.num_prefix_nodes, worker.manager._tree.roots()) == (0, [])


# -- nobody else knows a kind

_CORE = Path(groups.__file__).parent.parent
_MANAGER = _CORE.parent
_TABLE_AT_THE_EDGE = _MANAGER / "group_codec.py"
_NO_KIND = {"SessionGroup", "make_groups"}
"""What others may import from `groups`: no kind is named."""
_OF_KINDS = {one.name for spec in groups.KINDS for one in fields(spec)} - {one.name for one in fields(GroupSpec)}
"""Attributes that only specs of one kind have."""


def _names_of_kinds(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in _OF_KINDS | {"unit_pool"}:
            found.append(f"{path.name}:{node.lineno} asks for {node.attr}")
        elif isinstance(node, ast.ImportFrom) and "groups" in (node.module or "").split("."):
            found += [f"{path.name}:{node.lineno} imports {one.name}" for one in node.names if one.name not in _NO_KIND]
    return found


def test_no_other_file_of_the_manager_knows_a_kind() -> None:
    """A new kind is one module in `groups` and a line in KINDS there, and a line in the table of the edge."""
    others = [path for path in _MANAGER.rglob("*.py") if _CORE / "groups" not in path.parents]
    others.remove(_TABLE_AT_THE_EDGE)
    assert len(others) > 65
    assert [one for path in others for one in _names_of_kinds(path)] == []
    assert _names_of_kinds(_CORE / "groups" / "window.py"), "the test finds what it looks for"
    assert _names_of_kinds(_TABLE_AT_THE_EDGE), "the test finds what it looks for"


def test_the_table_of_the_edge_has_each_kind() -> None:
    messages = common_pb2.KVCacheGroup.DESCRIPTOR.oneofs_by_name["spec"].fields
    assert {one.name for one in messages} == {*group_codec.KINDS}
    assert {*group_codec.KINDS.values()} == {*groups.KINDS}
    for message in messages:
        assert message.message_type is not None
        own = {one.name for one in fields(group_codec.KINDS[message.name])} - {one.name for one in fields(GroupSpec)}
        assert {one.name for one in message.message_type.fields} == own
