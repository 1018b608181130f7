"""`Check` is the witness of every other test, so it is tried itself: each law is broken by hand, and it must say which law, on
which worker, and which block or sequence."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, MutableSequence
from hashlib import sha256
from typing import Any

import pytest

from kvpool.cache_service.core import integrity
from kvpool.cache_service.core.block_pool import CACHED, FREE, HELD, BlockPool
from kvpool.cache_service.core.groups.unit_pool import UnitPool
from kvpool.cache_service.core.groups.window import WindowTable
from kvpool.cache_service.core.integrity import Violation
from kvpool.cache_service.core.messages import BlockCounts, SequenceKey
from kvpool.cache_service.core.prefix_tree import Leaders, Node, RootNode
from kvpool.cache_service.core.sequence import Sequence
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.kinds import unit_pool
from tests.cache_service.core.lockstep import key

A, B, C, D = key("a"), key("b"), key("c"), key("d")
ROOTS = [ROOT._replace(input_digest=sha256(bytes([number])).digest()) for number in range(3)]
"""Each with another input of an encoder."""


class Scene:
    """A worker with every kind of block: a and b share two sealed blocks and own a sealed third and an unsealed tail; c holds a
    duplicate of the first; one block is in the reserve, one is cached behind nothing, some are free. In a second group, with a
    window of one block, a and b share the named second block, and all four have scratch. In a third group, with cross attention,
    a and b share a sealed unit of three blocks, one unit is cached, and the encoder has not run for d."""

    def __init__(self) -> None:
        self.desk = Desk((17, 17, 17), 2, windows=[(0, 0), (3, 2)], max_encoder_tokens=8)
        desk = self.desk
        self._grant("gone", [9, 9, 9], 0)
        desk.free("gone", 3)
        self._grant("a", [1, 2, 3, 4, 5, 6, 7], 1)
        desk.name("a", 2)
        desk.report("a")
        self._grant("b", [1, 2, 3, 4, 8, 8, 8], 1)
        desk.report("b")
        self._grant("c", [1, 2, 7, 7], 1, max_cached_tokens=0)
        desk.report("c", 2)
        desk.grant("d", [5, 5, 5], root=ROOTS[2], num_encoder_tokens=6)
        desk.lockstep.free(desk.uplink(reserve_wish=1))
        self.manager = desk.manager
        self.session = desk.session
        self.pool: BlockPool = self.session.pools[0]
        units = unit_pool(self.session)
        assert units is not None
        self.units: UnitPool = units
        self.tree = self.manager._tree
        assert self.manager.check().violations == []
        assert self.desk.counts._replace(free=0) == BlockCounts(16, 0, 1, 10, 1, 0, 2)

    def _grant(self, name: str, tokens: list[int], root: int, **wanted: Any) -> None:
        self.desk.grant(name, tokens, root=ROOTS[root], num_encoder_tokens=6, **wanted)
        self.desk.encode(name)

    def sequence(self, wanted: SequenceKey) -> Sequence:
        """A live sequence."""
        return self.session.sequences[wanted.sequence_id, wanted.attempt]

    def nodes(self, wanted: SequenceKey) -> list[Node]:
        """The nodes of its blocks."""
        nodes: list[Node] = self.sequence(wanted).nodes
        return nodes

    def table(self, wanted: SequenceKey) -> list[int]:
        """Its block table."""
        table: list[int] = self.sequence(wanted).tables[0]
        return table

    def window(self, wanted: SequenceKey) -> WindowTable:
        """What it has in the group with a window."""
        return self.desk.window(wanted)

    def unit_of(self, wanted: SequenceKey) -> list[int]:
        """Its unit."""
        table: list[int] = self.sequence(wanted).tables[2]
        return table

    def root(self, number: int) -> RootNode:
        """The node of a root."""
        root = self.tree.find_root(ROOTS[number], 2)
        assert isinstance(root, RootNode)
        return root

    def unit(self, number: int) -> tuple[int, ...]:
        """The blocks that a root has as its unit."""
        return self.root(number).input_blocks[self.session.holder]

    @property
    def cached(self) -> int:
        """The cached block."""
        return next(block for block in range(1, 17) if self.pool.is_cached(block))

    @property
    def free(self) -> int:
        """A free block in the middle of the list."""
        return list(self.pool.free_list())[2]


Break = Callable[[Scene], int | None]
"""Breaks a law; returns the block that is wrong, None if the law is not about one block."""


def put(array: MutableSequence[Any] | MutableMapping[int, Any], block: int, value: object) -> int:
    array[block] = value
    return block


def count(thing: object, name: str) -> None:
    """One more of something than there is."""
    setattr(thing, name, getattr(thing, name) + 1)


def name_in_a_table(scene: Scene, block: int) -> int:
    scene.table(C).append(block)
    return block


def lose_a_block(scene: Scene) -> int:
    block = scene.free
    scene.pool._unlink(block)
    scene.pool._num_free -= 1
    return block


def tie_the_list_into_a_knot(scene: Scene) -> int:
    blocks = list(scene.pool.free_list())
    scene.pool._next[blocks[2]] = blocks[1]
    return blocks[1]


def put_a_held_block_on_the_list(scene: Scene) -> int:
    scene.pool._push_tail(scene.table(A)[3])
    return scene.table(A)[3]


def splice_another_block_into_a_prefix(scene: Scene) -> int:
    scene.nodes(A)[0].copy_blocks = scene.table(B)[2]
    return scene.table(B)[2]


def hide_a_copy(scene: Scene, index: int) -> int:
    scene.nodes(A)[index].set_copy(scene.session.holder, 0, 0)
    return scene.table(A)[index]


def seal_before_it_is_computed(scene: Scene) -> int:
    scene.tree.name(scene.nodes(C)[1])
    scene.pool.seal(scene.table(C)[1], scene.nodes(C)[1])
    return scene.table(C)[1]


def share_an_unsealed_block(scene: Scene) -> int:
    block = name_in_a_table(scene, scene.table(A)[3])
    scene.pool._ref_count[block] = 2
    scene.pool._num_shared += 1
    return block


def seal_a_scratch_block(scene: Scene) -> int:
    (block,) = scene.window(A).scratch
    scene.session.pools[1].seal(block, scene.nodes(A)[2])
    return block


def give_a_scratch_block_to_a_second_sequence(scene: Scene) -> int:
    (block,) = scene.window(A).scratch
    scene.window(C).scratch[block] = None
    return put(scene.session.pools[1]._ref_count, block, 2)


def move_a_window(scene: Scene) -> int:
    entries = scene.window(A).entries
    entries[0] = entries.pop(1)
    return entries[0]


def name_what_is_not_computed(scene: Scene) -> int:
    window = scene.window(C)
    window.entries[1], _ = window.scratch.popitem()
    return window.entries[1]


def change_a_token(scene: Scene) -> None:
    scene.sequence(A).tokens[0] ^= 1


def stand_on_another_prefix(scene: Scene) -> None:
    nodes = scene.nodes(A)
    nodes[0], nodes[1] = nodes[1], nodes[0]


def drop_a_node_that_a_block_holds(scene: Scene) -> int:
    node = scene.pool.node(scene.cached)
    assert node is not None
    node.set_copy(scene.session.holder, 0, 0)
    scene.tree.prune(node)
    return scene.cached


def lead_after_the_end(scene: Scene) -> None:
    sequence = scene.sequence(C)
    scene.desk.free("c")
    scene.nodes(A)[0].add_leader(sequence)


def remember_an_attempt_that_ended(scene: Scene) -> None:
    sequence = scene.sequence(C)
    scene.desk.free("c")
    scene.manager._attempts.add(sequence)


def grant_a_block_that_is_not_counted(scene: Scene) -> int:
    block = scene.pool.last_granted
    scene.pool.last_granted -= 1
    scene.session.account.add_blocks(-1)
    return block


def let_go_of_half_a_unit(scene: Scene) -> int:
    return put(scene.units._state, scene.unit(0)[2], HELD)


def name_a_block_twice(scene: Scene) -> None:
    scene.root(0).input_blocks[scene.session.holder] = (*scene.unit(0)[:2], scene.unit(0)[0])


def forget_the_unit(scene: Scene) -> int:
    del scene.root(1).input_blocks[scene.session.holder]
    return scene.unit_of(A)[0]


def forget_the_last_block(scene: Scene) -> int:
    scene.root(1).input_blocks[scene.session.holder] = tuple(scene.unit_of(A)[:2])
    return scene.unit_of(A)[2]


def forget_that_it_may_go(scene: Scene) -> int:
    scene.units._cached_units.clear()
    return scene.unit(0)[0]


def let_a_unit_go(scene: Scene, number: int) -> int | None:
    scene.units._cached_units[scene.root(number)] = None
    return scene.unit_of(A)[0] if number == 1 else None


def share_what_is_not_computed(scene: Scene) -> None:
    scene.unit_of(B)[0] = scene.unit_of(D)[0]


CASES: list[tuple[str, Break, SequenceKey | None]] = [
    ("conservation", lambda s: count(s.pool, "_num_free"), None),
    ("conservation", lambda s: count(s.pool, "_num_shared"), None),
    ("free list", lose_a_block, None),
    ("free list", lambda s: put(s.pool._previous, s.free, 0), None),
    ("free list", tie_the_list_into_a_knot, None),
    ("free list", put_a_held_block_on_the_list, A),
    ("references", lambda s: put(s.pool._ref_count, s.table(A)[2], 3), A),
    ("references", lambda s: name_in_a_table(s, s.table(A)[3]), A),
    ("state", lambda s: put(s.pool._state, s.free, HELD), None),
    ("state", lambda s: put(s.pool._state, s.cached, FREE), None),
    ("state", lambda s: put(s.pool._node, s.free, s.nodes(A)[0]), None),
    ("null block", lambda s: put(s.pool._state, 0, HELD), None),
    ("null block", lambda s: name_in_a_table(s, 0), C),
    ("generation", lambda s: put(s.pool._generation, s.table(C)[1], s.manager.last_generation + 1000), C),
    ("generation", lambda s: put(s.pool._generation, s.table(C)[1], 0), C),
    ("sealing", lambda s: put(s.pool._node, s.table(B)[2], None), B),
    ("sealing", splice_another_block_into_a_prefix, None),
    ("sealing", lambda s: hide_a_copy(s, 2), A),
    ("sealing", seal_before_it_is_computed, C),
    ("sealing", lambda s: count(s.sequence(C), "num_sealed"), C),
    ("sealing", lambda s: setattr(s.sequence(C), "num_computed_tokens", 40), C),
    ("sealing", lambda s: put(s.pool._duplicates[s.nodes(A)[0]], s.table(B)[2], None), B),
    ("fork", share_an_unsealed_block, A),
    ("scratch", seal_a_scratch_block, A),
    ("scratch", give_a_scratch_block_to_a_second_sequence, A),
    ("window", move_a_window, A),
    ("window", name_what_is_not_computed, C),
    ("dependents", lambda s: hide_a_copy(s, 1) and s.window(A).entries[1], A),
    ("chain", change_a_token, A),
    ("chain", stand_on_another_prefix, A),
    ("tree", lambda s: count(s.nodes(A)[-1], "num_sequences"), A),
    ("tree", lambda s: setattr(s.nodes(A)[2], "depth", 7), A),
    ("tree", drop_a_node_that_a_block_holds, None),
    ("tree", lambda s: s.nodes(C)[1].drop_leader(s.sequence(C)), C),
    ("tree", lead_after_the_end, C),
    ("attempts", lambda s: s.manager._attempts.drop(s.sequence(A)), A),
    ("attempts", remember_an_attempt_that_ended, C),
    ("attempts", lambda s: setattr(s.sequence(B), "key", key("b", attempt=2)), key("b", attempt=2)),
    ("budget", lambda s: s.session.account.add_blocks(-1), None),
    ("budget", grant_a_block_that_is_not_counted, None),
    ("budget", lambda s: s.session.account.add_tokens(4), None),
    ("unit", lambda s: put(s.units._node, s.unit_of(A)[1], None), A),
    ("unit", lambda s: put(s.units._node, s.unit_of(A)[1], s.root(0)), None),
    ("unit", let_go_of_half_a_unit, None),
    ("unit", lambda s: put(s.units._state, s.unit_of(A)[2], CACHED), None),
    ("unit", lambda s: put(s.units._ref_count, s.unit_of(A)[2], 3), None),
    ("unit", name_a_block_twice, None),
    ("unit", forget_the_unit, A),
    ("unit", forget_the_last_block, None),
    ("unit", forget_that_it_may_go, None),
    ("unit", lambda s: let_a_unit_go(s, 1), None),
    ("unit", lambda s: let_a_unit_go(s, 2), None),
    ("unit", share_what_is_not_computed, B),
    ("unit", lambda s: s.units.seal_unit(s.unit_of(D), s.sequence(D).root), D),
    ("unit", lambda s: setattr(s.sequence(D), "num_computed_tokens", 1), D),
    ("unit", lambda s: s.sequence(D).root.drop_leader(s.sequence(D)), D),
    ("unit", lambda s: s.unit_of(D).clear(), D),
]


each_law = pytest.mark.parametrize(
    ("law", "break_it", "sequence"), CASES, ids=[f"{number} {law}" for number, (law, _, _) in enumerate(CASES)]
)


def leads_there(
    violations: list[Violation], law: str, scene: Scene, block: int | None, sequence: SequenceKey | None
) -> list[Violation]:
    """Those that name the law, the worker, and the block or the sequence."""
    return [
        violation
        for violation in violations
        if (violation.law, violation.worker_id, violation.session) == (law, "w1", scene.session.number)
        and block in (None, violation.block)
        and sequence in (None, violation.sequence)
    ]


@each_law
def test_check_names_law_worker_block_and_sequence(law: str, break_it: Break, sequence: SequenceKey | None) -> None:
    scene = Scene()
    block = break_it(scene)
    violations = scene.manager.check().violations
    assert leads_there(violations, law, scene, block, sequence), violations


def test_check_sees_a_signature_that_is_not_of_its_pools() -> None:
    """Route would take the end of a prefix for its going on."""
    scene = Scene()
    other = Desk(num_blocks=17, block_size=2, worker_id="other", lockstep=scene.desk.lockstep)
    other.serve("other", [1, 2, 3], root=ROOTS[1])
    node = scene.sequence(A).nodes[0]
    assert node.copies is not None
    assert scene.manager.check().violations == []
    node.copies.signature ^= 1
    (violation,) = scene.manager.check().violations
    assert (violation.law, violation.block) == ("tree", scene.table(A)[0])
    assert "signature" in violation.message


@pytest.mark.parametrize("total", ["num_blocks", "num_slots", "tokens_left"])
def test_check_sees_a_budget_that_is_not_the_sum(total: str) -> None:
    """What is refused for the sake of all workers must be what all workers have."""
    scene = Scene()
    setattr(scene.manager.budget, total, getattr(scene.manager.budget, total) + 1)
    (violation,) = scene.manager.check().violations
    assert (violation.law, violation.worker_id) == ("budget", "")


def test_check_sees_blocks_that_no_block_of_the_list_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool grows before its last known block is granted; else the blocks after it would be lost."""
    desk = Desk(num_blocks=100, block_size=2)
    desk.grant("a", [1] * 9)
    pool = desk.session.pools[0]
    assert desk.manager.check().violations == []
    assert pool.num_known < pool.num_blocks
    monkeypatch.setattr(pool, "_grow", lambda: None)
    desk.manager.free(desk.uplink(reserve_wish=pool.num_known - 1 - pool.last_granted), [])
    (violation,) = [v for v in desk.manager.check().violations if v.law == "free list"]
    assert f"those from {pool.num_known} on" in violation.message


@pytest.mark.parametrize("spoil", ["signature", "count"])
def test_check_sees_leaders_that_are_counted_wrong(spoil: str) -> None:
    """Route would take a prefix for being computed that is not, or the other way round."""
    scene = Scene()
    scene.desk.grant("e", [1, 2, 7, 7], root=ROOTS[1], num_encoder_tokens=6, no_wait=True, max_cached_tokens=0)
    leaders = scene.sequence(key("e")).nodes[1].leaders
    assert isinstance(leaders, Leaders)
    assert scene.manager.check().violations == []
    if spoil == "signature":
        leaders.signature ^= 1
    else:
        leaders.num_by_holder[scene.session.holder] += 1
    (violation,) = scene.manager.check().violations
    assert violation.law == "tree"
    assert "leaders" in violation.message


def test_every_law_of_the_list_is_tried() -> None:
    """A law that is added to the audit's list gets a case here."""
    assert integrity.__doc__ is not None
    listed = {line[2:].split(":")[0] for line in integrity.__doc__.splitlines() if line.startswith("* ")}
    assert listed == {law for law, _, _ in CASES}


def test_check_changes_nothing_and_counts_what_it_saw() -> None:
    scene = Scene()
    audit = scene.manager.check()
    assert (audit.num_blocks, audit.num_sequences, audit.num_sessions) == (48, 4, 1)
    assert audit.num_nodes == scene.manager.num_prefix_nodes
    scene.desk.lockstep.compare()
