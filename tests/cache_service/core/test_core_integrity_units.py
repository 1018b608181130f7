"""`Check` finds every way in which a unit is not whole, and says where."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

import pytest

from kvpool.cache_service.core.block_pool import CACHED, HELD
from kvpool.cache_service.core.groups.unit_pool import UnitPool
from kvpool.cache_service.core.messages import SequenceKey, SequenceUpdate
from kvpool.cache_service.core.prefix_tree import RootNode
from kvpool.cache_service.core.sequence import Sequence
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.kinds import unit_pool
from tests.cache_service.core.lockstep import key
from tests.cache_service.core.test_core_integrity import put

A, B, C = key("a"), key("b"), key("c")


class Scene:
    """a and b share a sealed unit of three blocks, c has one that it has not computed, another one is cached."""

    def __init__(self) -> None:
        self.desk = Desk((17, 17), 2, max_encoder_tokens=8)
        self.roots = [ROOT._replace(input_digest=sha256(bytes([i])).digest()) for i in range(3)]
        for name, root in (("gone", self.roots[0]), ("a", self.roots[1]), ("b", self.roots[1]), ("c", self.roots[2])):
            self.desk.grant(name, [1, 2, 3], root=root, num_encoder_tokens=6)
            update = SequenceUpdate(key(name), num_computed_tokens=3, encoder_computed=True)
            if name == "gone":
                self.desk.leave(update)
            elif name == "a":
                self.desk.tell(update)
        self.manager = self.desk.manager
        self.session = self.desk.session
        pool = unit_pool(self.session)
        assert pool is not None
        self.pool: UnitPool = pool
        assert self.manager.check().violations == []

    def sequence(self, wanted: SequenceKey) -> Sequence:
        """A live sequence."""
        return self.session.sequences[wanted.sequence_id, wanted.attempt]

    def table(self, wanted: SequenceKey) -> list[int]:
        """Its unit."""
        table: list[int] = self.sequence(wanted).tables[1]
        return table

    def unit(self, number: int) -> tuple[int, ...]:
        """The blocks that a root has as its unit."""
        return self.root(number).input_blocks[self.session.holder]

    def root(self, number: int) -> RootNode:
        """The node of a root."""
        root = self.manager._tree.find_root(self.roots[number], 2)
        assert isinstance(root, RootNode)
        return root


def let_go_of_half_a_unit(scene: Scene) -> int:
    return put(scene.pool._state, scene.unit(0)[2], HELD)


def name_a_block_twice(scene: Scene) -> None:
    scene.root(0).input_blocks[scene.session.holder] = (*scene.unit(0)[:2], scene.unit(0)[0])


def forget_the_unit(scene: Scene) -> int:
    del scene.root(1).input_blocks[scene.session.holder]
    return scene.table(A)[0]


def forget_the_last_block(scene: Scene) -> int:
    scene.root(1).input_blocks[scene.session.holder] = tuple(scene.table(A)[:2])
    return scene.table(A)[2]


def forget_that_it_may_go(scene: Scene) -> int:
    scene.pool._cached_units.clear()
    return scene.unit(0)[0]


def let_a_unit_go(scene: Scene, number: int) -> int | None:
    scene.pool._cached_units[scene.root(number)] = None
    return scene.table(A)[0] if number == 1 else None


def share_what_is_not_computed(scene: Scene) -> None:
    scene.table(B)[0] = scene.table(C)[0]


CASES: list[tuple[Callable[[Scene], int | None], SequenceKey | None]] = [
    (lambda s: put(s.pool._node, s.table(A)[1], None), A),
    (lambda s: put(s.pool._node, s.table(A)[1], s.root(0)), None),
    (let_go_of_half_a_unit, None),
    (lambda s: put(s.pool._state, s.table(A)[2], CACHED), None),
    (lambda s: put(s.pool._ref_count, s.table(A)[2], 3), None),
    (name_a_block_twice, None),
    (forget_the_unit, A),
    (forget_the_last_block, None),
    (forget_that_it_may_go, None),
    (lambda s: let_a_unit_go(s, 1), None),
    (lambda s: let_a_unit_go(s, 2), None),
    (share_what_is_not_computed, B),
    (lambda s: s.pool.seal_unit(s.table(C), s.sequence(C).root), C),
    (lambda s: setattr(s.sequence(C), "num_computed_tokens", 1), C),
    (lambda s: s.sequence(C).root.drop_leader(s.sequence(C)), C),
    (lambda s: s.table(C).clear(), C),
]
"""Each breaks the law, and returns the block that is wrong, None if it is not about one block; and the sequence that is named."""


@pytest.mark.parametrize(("break_it", "sequence"), CASES)
def test_check_names_the_unit_that_is_not_whole(
    break_it: Callable[[Scene], int | None], sequence: SequenceKey | None
) -> None:
    scene = Scene()
    block = break_it(scene)
    found = [one for one in scene.manager.check().violations if one.law == "unit"]
    assert any(block in (None, one.block) and sequence in (None, one.sequence) for one in found), found
