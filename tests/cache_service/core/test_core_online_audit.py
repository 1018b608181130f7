"""The audit in slices: no false alarm whatever happens between them, and nothing missed that is broken all the time."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvpool.cache_service.core import block_pool, prefix_tree
from kvpool.cache_service.core import manager as manager_module
from kvpool.cache_service.core.block_pool import State
from kvpool.cache_service.core.hashing import xxh64
from kvpool.cache_service.core.integrity import OnlineAudit, Violation
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    AppendItem,
    Granted,
    Limits,
    Root,
    SequenceKey,
    SequenceUpdate,
    Uplink,
)
from kvpool.cache_service.core.prefix_tree import Fan, PrefixTree
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import Lockstep, key, registration, token_bytes
from tests.cache_service.core.test_core_integrity import ROOTS, Break, Scene, each_law, leads_there
from tests.cache_service.core.test_core_state_machine import TIGHT, ManagerMachine, explore


def fine(manager: CacheManager) -> OnlineAudit:
    """An audit that pauses as often as one can: after each block, entry and node."""
    return OnlineAudit(manager._world(), portion=1)


def finish(audit: OnlineAudit, between: Callable[[], object] = lambda: None) -> list[Violation]:
    """Run it to its end, with something happening after each slice."""
    while audit.step(1):
        between()
    audit.close()
    return audit.result().violations


class Visitor:
    """Another worker, whose requests come and go, and share prefixes with those of the scene. Nobody checks the laws meanwhile."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._session = manager.register(registration("w2", num_blocks=9, block_size=2), 0.0).session
        self._call_no = 0
        self._live: list[SequenceKey] = []

    def __call__(self) -> None:
        """One call: a request arrives, or its prompt has been computed, or it ends."""
        self._call_no += 1
        uplink = Uplink(self._session, self._call_no)
        if not self._live:
            tokens = [1, 2, 3, 4, self._call_no, 5, 6]
            name = key(f"visitor-{self._call_no}")
            outcomes, _ = self._manager.allocate(uplink, [AllocateItem(name, ROOTS[1], token_bytes(tokens), 1, True)])
            assert isinstance(outcomes[0], Granted)
            self._live.append(name)
        elif self._call_no % 3 == 2:
            self._manager.append(uplink, [AppendItem(SequenceUpdate(self._live[0], 7, b"", 7))])
        else:
            self._manager.free(uplink, [SequenceUpdate(self._live.pop())])


@each_law
def test_what_is_broken_before_the_beginning_is_found(law: str, break_it: Break, sequence: SequenceKey | None) -> None:
    """However much else comes and goes between the slices."""
    scene = Scene()
    block = break_it(scene)
    visitor = Visitor(scene.manager)
    visitor()
    violations = finish(fine(scene.manager), visitor)
    assert leads_there(violations, law, scene, block, sequence), violations


@each_law
def test_slices_and_one_go_come_to_the_same(law: str, break_it: Break, sequence: SequenceKey | None) -> None:
    scene = Scene()
    audit = fine(scene.manager)
    assert (finish(audit), audit.result()) == ([], scene.manager.check())
    break_it(scene)
    audit = fine(scene.manager)
    assert sorted(map(repr, finish(audit))) == sorted(map(repr, scene.manager.check().violations)) != []
    assert replace(audit.result(), violations=[]) == replace(scene.manager.check(), violations=[])


@each_law
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_what_breaks_during_an_audit(law: str, break_it: Break, sequence: SequenceKey | None, part: float) -> None:
    """It may be found at once, is told truly if it is, and is found by the next audit for certain."""
    pauses = 0
    audit = fine(Scene().manager)
    while audit.step(1):
        pauses += 1
    audit.close()
    scene = Scene()
    audit = fine(scene.manager)
    for _ in range(round(pauses * part)):
        assert audit.step(1)
    block = break_it(scene)
    found = {(violation.law, violation.block) for violation in finish(audit)}
    assert found <= {(violation.law, violation.block) for violation in scene.manager.check().violations}
    assert leads_there(finish(fine(scene.manager)), law, scene, block, sequence)


@pytest.mark.parametrize("change", [1, -1])
def test_nodes_that_are_lost_or_counted_twice_are_found_while_others_come_and_go(change: int) -> None:
    scene = Scene()
    visitor = Visitor(scene.manager)
    scene.tree.num_nodes += change
    assert {violation.law for violation in finish(fine(scene.manager), visitor)} == {"tree"}


def test_a_node_that_nothing_keeps_is_found_while_others_come_and_go() -> None:
    scene = Scene()
    visitor = Visitor(scene.manager)
    path: list[prefix_tree.Node] = []
    scene.tree.extend(path, scene.sequence(key("a")).root, b"\5" * 16, 2, 2)
    violations = finish(fine(scene.manager), visitor)
    assert any("no copy, child or sequence" in violation.message for violation in violations)


def test_a_node_that_counts_sequences_of_nobody_is_found() -> None:
    """None stands on it, so no sequence can be asked."""
    scene = Scene()
    visitor = Visitor(scene.manager)
    block = scene.cached
    node = scene.pool.node(block)
    assert node is not None
    node.num_sequences += 1
    violations = finish(fine(scene.manager), visitor)
    assert [violation.law for violation in violations] == ["tree"]
    assert "counts 1 sequences, 0 end at it" in violations[0].message


def test_a_copy_in_a_pool_of_no_session_is_found() -> None:
    """What a sweep leaves behind."""
    desk = Desk()
    desk.serve("s", range(9))
    desk.manager.deregister(desk.number)
    desk.manager._retired.clear()
    assert {violation.law for violation in desk.manager.check().violations} == {"tree"}


def test_a_sealed_block_that_its_node_does_not_know_is_found() -> None:
    """A duplicate that was forgotten would never become the copy that serves hits."""
    scene = Scene()
    scene.pool._duplicates.clear()
    found = [violation for violation in scene.manager.check().violations if violation.law == "sealing"]
    assert [(violation.block, violation.sequence) for violation in found] == [(scene.table(key("c"))[0], key("c"))]


class AuditedMachine(ManagerMachine):
    """An audit is under way all the time, a few slices after every operation."""

    units = 3
    """Of work between two operations."""

    def __init__(self, draw: random.Random, limits: Limits) -> None:
        super().__init__(draw, limits)
        self.num_audits = 0
        self._audited: CacheManager | None = None
        self._audit: OnlineAudit | None = None
        compare = self.lockstep.compare

        def compare_and_go_on() -> None:
            compare()
            self._go_on()

        self.lockstep.compare = compare_and_go_on  # type: ignore[method-assign]

    def _go_on(self) -> None:
        if self._audited is not self.lockstep.manager:
            self._audit = None
            self._audited = self.lockstep.manager
        if self._audit is None:
            self._audit = fine(self._audited)
        for _ in range(4):
            if not self._audit.step(self.units):
                assert self._audit.result().violations == []
                self._audit.close()
                self._audit = None
                self.num_audits += 1
                return


@pytest.fixture
def small_structures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes thousands of blocks or children otherwise happens with two."""
    monkeypatch.setattr(block_pool, "_GROWTH_BLOCKS", 2)
    monkeypatch.setattr(prefix_tree, "FAN_CHILDREN", 1)
    monkeypatch.setattr(manager_module, "SWEEP_SLICE_NODES", 2)


@pytest.mark.parametrize("units", [1, 8, 64])
def test_no_false_alarm_whatever_the_network_does(
    units: int, small_structures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any operations between the slices: allocations, reports, evictions, fencing, sweeps, the end of the manager's life."""
    monkeypatch.setattr(AuditedMachine, "units", units)
    explore(AuditedMachine, 6)


@pytest.mark.parametrize("seed", range(3))
def test_no_false_alarm_in_a_long_history(seed: int, small_structures: None) -> None:
    machine = AuditedMachine(random.Random(seed), TIGHT)
    machine.units = [1, 8, 40][seed % 3]
    machine.run(200)
    assert machine.num_audits >= 2


def _chains(num_chains: int, length: int) -> Desk:
    desk = Desk(num_blocks=num_chains * length + 1, block_size=1)
    for i in range(num_chains):
        desk.serve(f"s{i}", [i, *range(100, 100 + length - 1)])
    return desk


def test_a_sweep_at_the_same_time_is_no_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the copies that wait for it, nor the nodes at which it has paused, nor the session that has ended."""
    monkeypatch.setattr(manager_module, "SWEEP_SLICE_NODES", 3)
    desk = _chains(4, 8)
    stays = Desk(lockstep=desk.lockstep, worker_id="stays")
    stays.grant("other", range(9))
    manager = desk.manager
    for when in range(0, 400, 40):
        audit = fine(manager)
        for _ in range(when):
            audit.step(1)
        if when == 80:
            desk.lockstep.deregister(desk.number)
        assert finish(audit, manager.sweep) == []
    while manager.sweep():
        pass
    assert manager.num_prefix_nodes == 2


def test_a_sequence_that_ends_between_two_of_its_windows_is_no_violation() -> None:
    for when in range(60):
        desk = Desk((9, 9), block_size=4, windows=[(6, 4), (6, 4)])
        desk.grant("a", range(9))
        audit = fine(desk.manager)
        for _ in range(when):
            audit.step(1)
        desk.free("a", 9)
        assert finish(audit) == []


def test_a_long_chain_goes_in_slices_and_may_come_back_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep drops the last block last, and with it the whole chain; a request that meets half of it keeps that half."""
    monkeypatch.setattr(manager_module, "SWEEP_SLICE_NODES", 5)
    length = 40
    desk = _chains(1, length)
    other = Desk(num_blocks=64, block_size=1, lockstep=desk.lockstep, worker_id="other")
    manager = desk.manager
    manager.deregister(desk.number)
    while not manager._tree.has_condemned:
        before = manager.num_prefix_nodes
        assert manager.sweep()
        assert before - manager.num_prefix_nodes <= 5
    half = manager.num_prefix_nodes - 1
    outcomes, _ = manager.allocate(
        Uplink(other.number, 1), [AllocateItem(key("r"), ROOT, token_bytes([0, *range(100, 100 + half - 1)]))]
    )
    assert isinstance(outcomes[0], Granted)
    while manager.sweep():
        assert manager.check().violations == []
    assert manager.num_prefix_nodes == half
    manager.free(Uplink(other.number, 2), [SequenceUpdate(key("r"))])
    assert manager.num_prefix_nodes == 0
    assert manager.check().violations == []


def test_an_audit_that_is_given_up_leaves_nothing_behind() -> None:
    """The tree tells nobody of its nodes any more, nothing holds the audit, and the next one finds everything as it is."""
    scene = Scene()
    gc.collect()
    gc.disable()
    try:
        for num_slices in range(0, 120, 7):
            audit = fine(scene.manager)
            for _ in range(num_slices):
                audit.step(1)
            audit.close()
            audit.close()
            assert scene.tree.walk is None
            assert not audit.step(1), "it cannot be taken up again"
            del audit
            assert gc.collect() == 0
    finally:
        gc.enable()
    assert finish(fine(scene.manager)) == []


def test_one_audit_in_slices_at_a_time() -> None:
    """The nodes are marked for one; an audit at once needs no marks, and may come between its slices."""
    scene = Scene()
    audit = fine(scene.manager)
    with pytest.raises(AssertionError, match="one walk"):
        fine(scene.manager)
    assert finish(audit, lambda: scene.manager.check().violations.index) == []


def test_a_slice_is_bounded() -> None:
    """At most one portion, snapshot or count of all sequences beyond its units: the number of slices grows with the world."""

    def num_slices(num_blocks: int) -> int:
        manager = CacheManager(1, limits=Limits(max_reserve_blocks=num_blocks, max_blocks_per_grant=num_blocks))
        session = manager.register(registration(num_blocks=num_blocks), 0.0).session
        manager.free(Uplink(session, 1, reserve_wishes=(num_blocks,)), [])
        audit = manager.begin_audit()
        count = 0
        while audit.step():
            count += 1
        audit.close()
        assert audit.result().num_blocks == num_blocks - 1
        return count

    assert num_slices(1 << 17) > 4 * num_slices(1 << 14) > 40


def test_the_children_of_a_fan_are_those_of_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found, listed and dropped the same, below and above the size at which they are kept in parts."""
    monkeypatch.setattr(prefix_tree, "FAN_CHILDREN", 10)
    tree = PrefixTree(xxh64)
    root = tree.intern_root(Root("m"), 1)
    pieces = [token_bytes([i]) for i in range(30)]
    nodes = {piece: tree.intern(root, piece) for piece in pieces}
    assert isinstance(root.children, Fan)
    assert {piece: root.find(piece) for piece in pieces} == nodes
    assert root.find(token_bytes([99])) is None
    assert sorted(node.tokens for node in root.iter_children()) == sorted(pieces)
    assert all(tree.intern(root, piece) is node for piece, node in nodes.items())
    for i, (piece, node) in enumerate(nodes.items()):
        assert tree.prune(node) == 1
        assert root.find(piece) is None
        assert tree.num_nodes == 29 - i == sum(1 for _ in root.iter_children())
    assert root.children is None
    assert tree.find_root(Root("m"), 1) is None


@pytest.mark.parametrize("growth", [1, 3, 1000])
def test_blocks_are_the_same_however_much_room_is_made_at_a_time(growth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that was never granted in full, looked at in full after every call."""
    monkeypatch.setattr(block_pool, "_GROWTH_BLOCKS", growth)
    desk = Desk(num_blocks=30, block_size=2, lockstep=Lockstep())
    pool = desk.session.pools[0]
    for i in range(4):
        desk.serve(f"s{i}", [i, *range(4)])
        assert [pool.generation(block) > 0 for block in range(30)] == [0 < block <= 2 * i + 3 for block in range(30)]
    assert pool.ref_count(29) == pool.generation(29) == 0
    assert pool.node(29) is None
    assert pool.state(29) is State.FREE
