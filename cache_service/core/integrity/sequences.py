"""The laws of sequences: sealing, chain, null block; and of all sequences together: attempts, and how many end at each node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..fencing import Fencing
from ..messages import TOKEN_BYTES
from ..prefix_tree import Node
from ..sequence import Sequence
from ..session import Session
from .findings import Audit, Course


class SequenceLaws:
    """Checks the sequences of one session, as they are; those that have ended since are skipped."""

    def __init__(self, session: Session, findings: Audit) -> None:
        self._session = session
        self._findings = findings

    def course(self) -> Course:
        """All of them."""
        living = self._session.sequences
        listed = list(living.items())
        yield len(listed) // 8
        for kept_as, sequence in listed:
            if living.get(kept_as) is not sequence:
                continue
            self._findings.num_sequences += 1
            self._figures(kept_as, sequence)
            yield 8
            for group in self._session.partial:
                if living.get(kept_as) is sequence:
                    for law, message, block in group.violations(sequence):
                        self._add(law, message, sequence, block, group.slot)
                    yield 3 * len(sequence.tables[group.slot])
            begin = 0
            while living.get(kept_as) is sequence and begin < max(
                [len(sequence.nodes), *(len(sequence.tables[group.slot]) for group in self._session.whole)]
            ):
                end = begin + self._findings.portion
                self._nodes(sequence, begin, end)
                for group in self._session.whole:
                    self._table(sequence, group.slot, begin, end)
                yield 3 * len(self._session.whole) * (end - begin)
                begin = end

    def _add(self, law: str, message: str, sequence: Sequence, block: int = -1, group: int = 0) -> None:
        self._findings.add(law, message, self._session, block, sequence, group)

    def _figures(self, kept_as: tuple[str, int], sequence: Sequence) -> None:
        size = self._session.block_size
        if (sequence.key.sequence_id, sequence.key.attempt) != kept_as or sequence.session is not self._session:
            self._add("attempts", "a session's sequence is kept under another key", sequence)
        if sequence.num_sealed != sequence.num_computed_tokens // size:
            self._add(
                "sealing",
                f"{sequence.num_computed_tokens} tokens are computed and {sequence.num_sealed} blocks of {size} sealed",
                sequence,
            )
        num_slots = min(
            [len(sequence.tables[of.slot]) * size for of in self._session.whole], default=sequence.num_tokens
        )
        if sequence.num_computed_tokens > min(sequence.num_tokens, num_slots):
            self._add(
                "sealing",
                f"{sequence.num_computed_tokens} tokens are computed, {sequence.num_tokens} known, in {num_slots} slots",
                sequence,
            )

    def _nodes(self, sequence: Sequence, begin: int, end: int) -> None:
        nodes, num_sealed = sequence.nodes, sequence.num_sealed
        if begin >= len(nodes):
            return  # the entries of a table that hold what is generated, and not yet sealed
        before = nodes[begin - 1] if begin else sequence.root
        step = self._session.block_size * TOKEN_BYTES
        for index, node in enumerate(nodes[begin:end], begin):
            if (
                node.parent is not before
                or node.tokens != sequence.tokens[index * step : (index + 1) * step]
                or (before.child is not node and before.find(node.tokens) is not node)
            ):
                self._add("chain", f"node {index} is not the child that holds the sequence's tokens", sequence)
            if node.is_led_by(sequence) != (index >= num_sealed):
                self._add("tree", f"node {index} and the sequence disagree who computes it", sequence)
            before = node

    def _table(self, sequence: Sequence, group: int, begin: int, end: int) -> None:
        pool, nodes, num_sealed = self._session.pools[group], sequence.nodes, sequence.num_sealed
        for index, block in enumerate(sequence.tables[group][begin:end], begin):
            if not 0 < block < pool.num_blocks:
                self._add("null block", f"entry {index} names block {block}", sequence, block, group)
            elif pool.node(block) is not (nodes[index] if index < min(num_sealed, len(nodes)) else None):
                message = f"entry {index} (block {block}) is not sealed as it should be"
                self._add("sealing", message, sequence, block, group)


# The laws that need all live sequences at one moment: each of these takes place within one slice, some 0.5 ms per 1,000 of them.


def count_all(sessions: Iterable[Session], suspects: Iterable[Node], findings: Audit) -> Counter[Node]:
    """Compare the sequences whose path ends at a node with the node's count; also those of the suspects. Returns how many end
    where."""
    sequences = [sequence for session in sessions for sequence in session.sequences.values()]
    ending = Counter([sequence.nodes[-1] if sequence.nodes else sequence.root for sequence in sequences])
    wrong = [node for node, count in ending.items() if node.num_sequences != count]
    wrong += [node for node in suspects if node not in ending and node.num_sequences]
    for node in wrong:
        message = f"{node!r} counts {node.num_sequences} sequences, {ending[node]} end at it"
        sequence = next((s for s in sequences if (s.nodes[-1] if s.nodes else s.root) is node), None)
        findings.add("tree", message, None if sequence is None else sequence.session, -1, sequence)
    return ending


def compare_attempts(sessions: Iterable[Session], attempts: Fencing, findings: Audit) -> None:
    """The index of attempts holds exactly the live sequences."""
    living = {sequence for session in sessions for sequence in session.sequences.values()}
    indexed = set(attempts)
    for sequence in living - indexed:
        findings.add("attempts", "a live sequence is not in the index", sequence.session, -1, sequence)
    for sequence in indexed - living:
        findings.add("attempts", "the index holds a sequence that no session has", sequence.session, -1, sequence)
