"""Check: the manager's laws, recomputed from first principles and compared with what it keeps. Changes nothing.

Each violation names the law, the worker, and the block and sequence if there is one. The laws:

* conservation: free + cached + held + reserved = capacity, and each kept count is the number of blocks in that state
* references: a block's ref_count is the number of table entries of live sequences that name it
* free list: linked both ways without a cycle, and exactly the free and cached blocks are on it
* state: held means ref_count ≥ 1; free and reserved blocks hold nothing; cached blocks serve hits
* null block: block 0 is in no table and in no state but free
* generation: every granted block has a stamp, none larger than the last one given
* sealing: a node's copy in a pool and that pool's block point at each other; blocks shared by several tables are sealed;
  exactly the full computed blocks of a sequence are sealed
* chain: a sequence's nodes hold its tokens, each the child of the one before
* tree: child and parent point at each other; a node without copy, child and sequence is gone; counts and leaders are right
* attempts: the index of attempts holds exactly the live sequences
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from .attempts import Attempts
from .block_pool import BlockPool, State
from .messages import SequenceKey
from .prefix_tree import Node, PrefixTree
from .sequence import Sequence
from .session import Session


class Violation(NamedTuple):
    """A law that does not hold, and where."""

    law: str
    message: str
    worker_id: str = ""
    session: int = 0
    block: int = -1
    sequence: SequenceKey | None = None


class Audit(NamedTuple):
    """What was looked at, and what was wrong."""

    violations: list[Violation]
    num_blocks: int
    num_sequences: int
    num_nodes: int
    num_sessions: int


class _SessionAudit:
    """The laws of one session's pool and sequences."""

    def __init__(self, session: Session, last_generation: int) -> None:
        self._session = session
        self._pool: BlockPool = session.pool
        self._last_generation = last_generation
        self._owners: dict[int, list[Sequence]] = {}
        for sequence in session.sequences.values():
            for block in sequence.table:
                self._owners.setdefault(block, []).append(sequence)

    def _violation(self, law: str, message: str, block: int = -1, sequence: Sequence | None = None) -> Violation:
        if sequence is None and block in self._owners:
            sequence = self._owners[block][0]
        return Violation(
            law,
            message,
            self._session.worker_id,
            self._session.number,
            block,
            None if sequence is None else sequence.key,
        )

    def run(self) -> Iterator[Violation]:
        """All laws of the session."""
        yield from self._conservation()
        yield from self._free_list()
        for block in range(1, self._pool.num_blocks):
            yield from self._block(block)
        yield from self._null_block()
        yield from self._duplicates()
        for sequence in self._session.sequences.values():
            yield from self._sequence(sequence)

    def _conservation(self) -> Iterator[Violation]:
        pool, counts = self._pool, self._pool.counts()
        found = Counter(pool.state(block) for block in range(1, pool.num_blocks))
        kept = {
            State.FREE: counts.free,
            State.CACHED: counts.cached,
            State.HELD: counts.held,
            State.RESERVED: counts.reserved,
        }
        for state, count in kept.items():
            if found[state] != count:
                yield self._violation(
                    "conservation", f"{found[state]} blocks are {state.name.lower()}, the pool counts {count}"
                )
        shared = sum(1 for block in range(1, pool.num_blocks) if pool.ref_count(block) >= 2)
        if shared != counts.shared:
            yield self._violation("conservation", f"{shared} blocks are shared, the pool counts {counts.shared}")

    def _free_list(self) -> Iterator[Violation]:
        pool = self._pool
        seen: set[int] = set()
        before = 0
        for block in pool.free_list():
            if block in seen or not 0 < block < pool.num_blocks:
                yield self._violation("free list", f"the list runs into block {block} twice or outside the pool", block)
                return
            if pool.previous(block) != before:
                yield self._violation(
                    "free list",
                    f"block {block} follows {before} but points back at {pool.previous(block)}",
                    block,
                )
            seen.add(block)
            before = block
        for block in range(1, pool.num_blocks):
            state = pool.state(block)
            if (block in seen) != (state in (State.FREE, State.CACHED)):
                where = "on" if block in seen else "not on"
                yield self._violation("free list", f"block {block} is {state.name.lower()} and {where} the list", block)

    def _block(self, block: int) -> Iterator[Violation]:
        pool = self._pool
        state, ref_count, node = pool.state(block), pool.ref_count(block), pool.node(block)
        owners = self._owners.get(block, [])
        if ref_count != len(owners):
            yield self._violation(
                "references",
                f"block {block} has ref_count {ref_count}, {len(owners)} table entries name it",
                block,
            )
        if (state is State.HELD) != (ref_count > 0):
            yield self._violation("state", f"block {block} is {state.name.lower()} with ref_count {ref_count}", block)
        if node is not None and state in (State.FREE, State.RESERVED):
            yield self._violation("state", f"block {block} is {state.name.lower()} and still sealed", block)
        if state is State.CACHED and (node is None or node.copy_in(pool) != block):
            yield self._violation("state", f"block {block} is cached and serves no hits", block)
        generation = pool.generation(block)
        if generation > self._last_generation or (generation == 0 and state is not State.FREE):
            yield self._violation(
                "generation",
                f"block {block} is {state.name.lower()} with generation {generation}; the last given is {self._last_generation}",
                block,
            )
        if ref_count >= 2 and node is None:
            yield self._violation("sealing", f"block {block} is shared by {ref_count} tables and not sealed", block)
        if node is not None:
            if node.block_hash is None:
                yield self._violation("sealing", f"block {block} is sealed and has no hash", block)
            if node.parent is None:
                yield self._violation("tree", f"block {block} holds a node that was dropped from the tree", block)
            if not node.copy_in(pool):
                yield self._violation("sealing", f"block {block} is sealed, its node knows no copy in this pool", block)

    def _null_block(self) -> Iterator[Violation]:
        pool = self._pool
        if pool.state(0) is not State.FREE or pool.ref_count(0) or pool.node(0) is not None or 0 in self._owners:
            yield self._violation("null block", "block 0 was granted, named or sealed", 0)

    def _duplicates(self) -> Iterator[Violation]:
        for node, blocks in self._pool.duplicates():
            for block in blocks:
                if self._pool.node(block) is not node or self._pool.state(block) is not State.HELD:
                    yield self._violation("sealing", f"block {block} is listed as a duplicate and is none", block)

    def _sequence(self, sequence: Sequence) -> Iterator[Violation]:
        pool, size = self._pool, self._pool.block_size
        if sequence.num_sealed != sequence.num_computed_tokens // size:
            yield self._violation(
                "sealing",
                f"{sequence.num_computed_tokens} tokens are computed and {sequence.num_sealed} blocks of {size} sealed",
                sequence=sequence,
            )
        if sequence.num_computed_tokens > min(sequence.num_tokens, len(sequence.table) * size):
            yield self._violation(
                "sealing",
                f"{sequence.num_computed_tokens} tokens are computed, {sequence.num_tokens} known, in {len(sequence.table)} blocks",
                sequence=sequence,
            )
        before = sequence.root
        for index, node in enumerate(sequence.nodes):
            if (
                node.parent is not before
                or node.tokens != sequence.block_tokens(index)
                or before.find(node.tokens) is not node
            ):
                yield self._violation(
                    "chain",
                    f"node {index} is not the child that holds the sequence's tokens",
                    sequence=sequence,
                )
            leads = sequence in node.iter_leaders()
            if leads != (index >= sequence.num_sealed):
                yield self._violation(
                    "tree", f"node {index} and the sequence disagree who computes it", sequence=sequence
                )
            before = node
        for index, block in enumerate(sequence.table):
            if not 0 < block < pool.num_blocks:
                yield self._violation("null block", f"entry {index} names block {block}", block, sequence)
                continue
            node_held = pool.node(block)
            expected = sequence.nodes[index] if index < sequence.num_sealed else None
            if node_held is not expected:
                yield self._violation(
                    "sealing", f"entry {index} (block {block}) is not sealed as it should be", block, sequence
                )


def _tree(tree: PrefixTree, sessions: list[Session]) -> Iterator[Violation]:
    """The laws of the prefix tree. Copies in retired pools are waiting for the sweep and count as copies."""
    by_pool = {session.pool: session for session in sessions}
    standing: dict[Node, list[Sequence]] = {}
    living: set[Sequence] = set()
    for session in sessions:
        for sequence in session.sequences.values():
            standing.setdefault(sequence.nodes[-1] if sequence.nodes else sequence.root, []).append(sequence)
            living.add(sequence)

    def violation(law: str, message: str, node: Node) -> Violation:
        """Names a sequence that stands on the node, or else a block that holds it."""
        for sequence in standing.get(node, []):
            return Violation(law, message, sequence.session.worker_id, sequence.session.number, -1, sequence.key)
        for pool in node.pools():
            session = by_pool[pool]
            return Violation(law, message, session.worker_id, session.number, node.copy_in(pool))
        return Violation(law, message)

    count = 0
    for node in tree.iter_nodes():
        if node.depth >= 0:
            count += 1
        if node.is_unused():
            yield violation("tree", f"{node!r} has no copy, child or sequence and is still there", node)
        num_standing = len(standing.get(node, ()))
        if node.num_sequences != num_standing:
            yield violation("tree", f"{node!r} counts {node.num_sequences} sequences, {num_standing} stand on it", node)
        for child in node.iter_children():
            if child.parent is not node or child.depth != node.depth + 1 or node.find(child.tokens) is not child:
                yield violation("tree", f"{child!r} and its parent {node!r} disagree", child)
        for pool in node.pools():
            block = node.copy_in(pool)
            if pool.node(block) is not node:
                yield Violation(
                    "sealing",
                    f"{node!r} names block {block} as its copy, which holds something else",
                    by_pool[pool].worker_id,
                    by_pool[pool].number,
                    block,
                )
        for leader in node.iter_leaders():
            if leader not in living:
                yield Violation(
                    "tree",
                    f"{node!r} is led by a sequence that has ended",
                    leader.session.worker_id,
                    leader.session.number,
                    -1,
                    leader.key,
                )
    if count != tree.num_nodes:
        yield Violation("tree", f"{count} nodes are reachable, {tree.num_nodes} are counted")


def _attempts(attempts: Attempts, sessions: list[Session]) -> Iterator[Violation]:
    def violation(message: str, sequence: Sequence, session: Session) -> Violation:
        return Violation("attempts", message, session.worker_id, session.number, -1, sequence.key)

    indexed = set(attempts)
    for session in sessions:
        for kept_as, sequence in session.sequences.items():
            if (sequence.key.sequence_id, sequence.key.attempt) != kept_as or sequence.session is not session:
                yield violation("a session's sequence is kept under another key", sequence, session)
            if sequence not in indexed:
                yield violation("a live sequence is not in the index", sequence, session)
            indexed.discard(sequence)
    for sequence in indexed:
        yield violation("the index holds a sequence that no session has", sequence, sequence.session)


def audit(
    tree: PrefixTree,
    attempts: Attempts,
    sessions: list[Session],
    retired: list[Session],
    last_generation: int,
) -> Audit:
    """Check every law over all sessions; `retired` are those whose sweep has not ended."""
    violations: list[Violation] = []
    for session in sessions:
        violations += _SessionAudit(session, last_generation).run()
    violations += _tree(tree, [*sessions, *retired])
    violations += _attempts(attempts, [*sessions, *retired])
    return Audit(
        violations,
        sum(session.pool.capacity for session in sessions),
        sum(len(session.sequences) for session in sessions),
        tree.num_nodes,
        len(sessions),
    )
