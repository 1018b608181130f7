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

    def root(self, number: int) -> RootNode:
        """The node of a root."""
        root = self.manager._tree.find_root(self.roots[number], 2)
        assert isinstance(root, RootNode)
        return root


Break = Callable[[Scene], int | None]
"""Breaks the law; returns the block that is wrong, None if it is not about one block."""


def _empty_one_block(scene: Scene) -> int:
    block = scene.table(A)[1]
    scene.pool._node[block] = None
    return block


def _give_a_block_another_root(scene: Scene) -> int:
    block = scene.table(A)[1]
    scene.pool._node[block] = scene.root(0)
    return block


def _let_go_of_half_a_unit(scene: Scene) -> int:
    block = scene.root(0).input_blocks[scene.session.holder][2]
    scene.pool._state[block] = HELD
    return block


def _cache_one_block_of_a_held_unit(scene: Scene) -> int:
    block = scene.table(A)[2]
    scene.pool._state[block] = CACHED
    return block


def _count_one_block_once_more(scene: Scene) -> int:
    block = scene.table(A)[2]
    scene.pool._ref_count[block] += 1
    return block


def _name_a_block_twice(scene: Scene) -> None:
    blocks = scene.root(0).input_blocks[scene.session.holder]
    scene.root(0).input_blocks[scene.session.holder] = (*blocks[:2], blocks[0])


def _forget_the_unit(scene: Scene) -> int:
    del scene.root(1).input_blocks[scene.session.holder]
    return scene.table(A)[0]


def _forget_the_last_block(scene: Scene) -> int:
    scene.root(1).input_blocks[scene.session.holder] = tuple(scene.table(A)[:2])
    return scene.table(A)[2]


def _forget_that_it_may_go(scene: Scene) -> int:
    scene.pool._cached_units.clear()
    return scene.root(0).input_blocks[scene.session.holder][0]


def _let_a_held_unit_go(scene: Scene) -> int:
    scene.pool._cached_units[scene.root(1)] = None
    return scene.table(A)[0]


def _let_a_unit_go_that_is_none(scene: Scene) -> None:
    scene.pool._cached_units[scene.root(2)] = None


def _share_what_is_not_computed(scene: Scene) -> None:
    scene.table(B)[0] = scene.table(C)[0]


def _seal_before_the_encoder_has_run(scene: Scene) -> None:
    scene.pool.seal_unit(scene.table(C), scene.sequence(C).root)


def _compute_without_the_encoder(scene: Scene) -> None:
    scene.sequence(C).num_computed_tokens = 1


def _forget_the_leader(scene: Scene) -> None:
    scene.sequence(C).root.drop_leader(scene.sequence(C))


def _lose_a_table(scene: Scene) -> None:
    scene.table(C).clear()


CASES: list[tuple[Break, SequenceKey | None]] = [
    (_empty_one_block, A),
    (_give_a_block_another_root, None),
    (_let_go_of_half_a_unit, None),
    (_cache_one_block_of_a_held_unit, None),
    (_count_one_block_once_more, None),
    (_name_a_block_twice, None),
    (_forget_the_unit, A),
    (_forget_the_last_block, None),
    (_forget_that_it_may_go, None),
    (_let_a_held_unit_go, None),
    (_let_a_unit_go_that_is_none, None),
    (_share_what_is_not_computed, B),
    (_seal_before_the_encoder_has_run, C),
    (_compute_without_the_encoder, C),
    (_forget_the_leader, C),
    (_lose_a_table, C),
]


@pytest.mark.parametrize(("break_it", "sequence"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_check_names_the_unit_that_is_not_whole(break_it: Break, sequence: SequenceKey | None) -> None:
    scene = Scene()
    block = break_it(scene)
    found = [one for one in scene.manager.check().violations if one.law == "unit"]
    assert any(block in (None, one.block) and sequence in (None, one.sequence) for one in found), found
