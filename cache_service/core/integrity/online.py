"""The audit, in slices or at once."""

from __future__ import annotations

from collections.abc import Iterator

from .budget import compare_budget
from .findings import Audit, Course, Findings
from .nodes import NodeLaws
from .pools import PoolLaws
from .sequences import SequenceLaws, compare_attempts, roll_call
from .world import World

SLICE = 2048
"""Units of one slice; some 0.5 ms. Photographs and roll calls take longer: some 3 ms for a million blocks and 4,000 sequences."""

PORTION = 512
"""Blocks, table entries or nodes that are looked at in one go."""


class OnlineAudit:
    """An audit in slices, between which the manager may do anything.

    Every law is evaluated on a state that the manager was in between two of its calls. There are three kinds:

    * Laws about one block, one sequence's figures, one entry of a table or one node are evaluated on the objects as they are,
      within one slice. What has ended since it was listed is passed over.
    * Laws about a whole pool (conservation, references, free list) are evaluated on a photograph: copies of the pool's arrays,
      and the lists of its tables with their lengths, all taken within one slice. The arithmetic on them takes many slices, and
      does not depend on what happens meanwhile: entries of a table's list never change, they are only added.
    * Laws about all sequences together (attempts, how many stand on a node) are evaluated within one slice, the roll call. A node
      that counts sequences, though none stood on it then, is put to a second roll call at the end.

    So (a) what is reported was so at some moment: there are no false alarms. And (b) what is broken at one place from before the
    beginning until the end is reported, because each place is come by: all sessions, blocks, sequences and entries that are there
    all the time are in the lists made at their turn, and all nodes that are there all the time are given out by the tree's walk.
    Whether the tree counts its nodes right is known at the end of that walk, which is told of the nodes that come and go.
    Two cases are no places in this sense. A session that ends is passed over with all its blocks. And whatever is repaired and
    broken again during the audit may be missed.

    `step` runs one slice. `close` must be called in the end, also by who gives up: until then the tree tells the audit of its
    nodes. Only one audit in slices may be under way at a time; one at once may run between its slices.
    """

    def __init__(self, world: World, *, portion: int = PORTION, in_slices: bool = True) -> None:
        self._world = world
        self._findings = Findings(portion)
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
        """What was found; all of it once `step` has returned False."""
        found = self._findings
        return Audit(found.violations, found.num_blocks, found.num_sequences, found.num_nodes, found.num_sessions)

    def close(self) -> None:
        """Leave nothing behind. Idempotent."""
        self._world.tree.end_walk(self._walk)
        self._course = iter(())

    def _run(self) -> Course:
        world, findings = self._world, self._findings
        standing = roll_call(world.all_sessions(), (), findings)
        yield 6 * standing.total()
        nodes = NodeLaws(world, self._walk, standing, findings)
        yield from nodes.course()
        if nodes.suspects:
            yield SLICE
            roll_call(world.all_sessions(), nodes.suspects, findings)
        yield SLICE
        compare_attempts(world.all_sessions(), world.attempts, findings)
        yield SLICE
        compare_budget(list(world.sessions.values()), world.budget, findings)
        yield SLICE
        sessions = list(world.sessions.values())
        for session in sessions:
            for laws in (PoolLaws(session, world.last_generation, findings), SequenceLaws(session, findings)):
                course = laws.course()
                for cost in course:
                    yield cost
                    if session.pool.retired:
                        break
            if not session.pool.retired:
                findings.num_blocks += session.pool.capacity
                findings.num_sessions += 1
        for session in sessions:
            yield from findings.name_owners(session)


def audit(world: World) -> Audit:
    """Check every law now, in one go. Time grows with the number of blocks, some seconds for a million."""
    run = OnlineAudit(world, in_slices=False)
    while run.step(1 << 60):
        pass
    run.close()
    return run.result()
