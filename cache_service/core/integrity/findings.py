"""What an audit finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..messages import SequenceKey
from ..prefix_tree import Leader
from ..sequence import Owner
from ..session import Session

Course = Iterator[int]
"""Laws being checked. Yields where the slice may end, each time the work done since the last yield, in units of some 0.3 µs on
one core of 2026."""

MAX_VIOLATIONS = 4096
"""Violations that one audit keeps: the first ones show the cause, the rest its consequences."""


class Violation(NamedTuple):
    """A law that does not hold, and where."""

    law: str
    message: str
    worker_id: str = ""
    session: int = 0
    block: int = -1
    sequence: SequenceKey | None = None
    group: int = 0
    """Number of the group whose pool has the block."""


@dataclass(slots=True)
class Audit:
    """The violations found so far, and what was checked."""

    portion: int = field(compare=False)
    """Blocks, table entries or nodes that are checked without a yield."""
    violations: list[Violation] = field(default_factory=list)
    num_blocks: int = 0
    num_sequences: int = 0
    num_nodes: int = 0
    num_sessions: int = 0

    def add(
        self,
        law: str,
        message: str,
        session: Owner | None = None,
        block: int = -1,
        sequence: Leader | None = None,
        group: int = 0,
    ) -> None:
        """Record a violation. `group`: that of the block."""
        if len(self.violations) < MAX_VIOLATIONS:
            key = None if sequence is None else sequence.key
            worker_id, number = ("", 0) if session is None else (session.worker_id, session.number)
            self.violations.append(Violation(law, message, worker_id, number, block, key, group))

    def name_owners(self, session: Session) -> Course:
        """Complete the violations of a session that name a block and no sequence by a sequence whose table has the block."""
        nameless: dict[int, set[int]] = {}
        for violation in self.violations:
            if violation.session == session.number and violation.sequence is None:
                nameless.setdefault(violation.group, set()).add(violation.block)
        owners: dict[tuple[int, int], SequenceKey] = {}
        if nameless:
            for sequence in list(session.sequences.values()):
                for group, blocks in nameless.items():
                    if not sequence.tables:
                        break  # it has ended since
                    table = session.by_slot[group].blocks(sequence)
                    for begin in range(0, len(table), self.portion):
                        for block in blocks.intersection(table[begin : begin + self.portion]):
                            owners.setdefault((group, block), sequence.key)
                        yield self.portion // 4
                yield 1
        if owners:
            self.violations = [
                violation._replace(sequence=owners.get((violation.group, violation.block)))
                if violation.session == session.number and violation.sequence is None
                else violation
                for violation in self.violations
            ]
