"""The audit, in slices or at once."""

from __future__ import annotations

from collections.abc import Iterator

from .budget import compare_budget
from .findings import Audit, Course
from .nodes import NodeLaws
from .pools import PoolLaws
from .sequences import SequenceLaws, compare_attempts, count_all
from .world import World

SLICE = 2048
"""Units of one slice; some 0.5 ms. Snapshots and counts of all sequences take longer: 3 ms for a million blocks, 4,000
sequences."""

PORTION = 512
"""Blocks, table entries or nodes that are checked without a yield."""


class OnlineAudit:
    """An audit in slices, between which the manager may do anything.

    Every law is evaluated on a state that the manager was in between two of its calls. There are three kinds of laws:

    * On one block, one sequence's figures, one table entry or one node: evaluated on the objects themselves, within one slice.
      Objects that have ended since they were listed are skipped.
    * On a whole pool (conservation, references, free list): evaluated on a snapshot, copies of the pool's arrays and the lists of
      its tables with their lengths, all taken within one slice. The arithmetic takes many slices and does not depend on calls
      between them: entries of a table's list never change, they are only added.
    * On all sequences together (attempts, how many sequences end at a node): evaluated within one slice, `count_all`. A node that
      counts sequences of which that slice found none is counted again at the end.

    So there are no false positives, and every violation that lasts throughout the audit is found: all sessions, blocks, sequences
    and entries that exist throughout are in the lists made at their turn, and the tree's walk returns all nodes that exist
    throughout. Whether the tree counts its nodes right is known at the end of the walk, which the tree notifies of insertions and
    removals. A session that ends during the audit is skipped with all its blocks, and a violation that is repaired and returns
    may be missed.

    `step` runs one slice. `close` must be called at the end, also of an audit that is given up: until then the tree notifies it.
    Only one audit in slices may run at a time; one at once may run between its slices.
    """

    def __init__(self, world: World, *, portion: int = PORTION, in_slices: bool = True) -> None:
        self._world = world
        self._findings = Audit(portion)
        self._walk = world.tree.begin_walk(in_portions=in_slices)
        self._course: Iterator[int] = self._run()

    def step(self, units: int = SLICE) -> bool:
        """One slice; returns whether another one is needed."""
        for cost in self._course:
            units -= cost
            if units <= 0:
                return True
        return False

    def result(self) -> Audit:
        """The findings; complete after `step` has returned False."""
        return self._findings

    def close(self) -> None:
        """End the tree's notifications. Idempotent."""
        self._world.tree.end_walk(self._walk)
        self._course = iter(())

    def _run(self) -> Course:
        world, findings = self._world, self._findings
        num_ending = count_all(world.all_sessions(), (), findings)
        yield 6 * num_ending.total()
        nodes = NodeLaws(world, self._walk, num_ending, findings)
        yield from nodes.course()
        if nodes.suspects:
            yield SLICE
            count_all(world.all_sessions(), nodes.suspects, findings)
        yield SLICE
        compare_attempts(world.all_sessions(), world.attempts, findings)
        yield SLICE
        compare_budget(list(world.sessions.values()), world.budget, findings)
        yield SLICE
        sessions = list(world.sessions.values())
        for session in sessions:
            courses = [PoolLaws(session, group, world.last_generation, findings).course() for group in session.by_slot]
            for course in (*courses, SequenceLaws(session, findings).course()):
                for cost in course:
                    yield cost
                    if session.retired:
                        break
            if not session.retired:
                findings.num_blocks += sum(pool.capacity for pool in session.pools)
                findings.num_sessions += 1
        for session in sessions:
            yield from findings.name_owners(session)


def audit(world: World) -> Audit:
    """Check every law now, at once. Time grows with the number of blocks, some seconds for a million."""
    run = OnlineAudit(world, in_slices=False)
    while run.step(1 << 60):
        pass
    run.close()
    return run.result()
