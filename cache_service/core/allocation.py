"""Allocate: look-up, pin and grant of one sequence, in one step that happens as a whole or changes nothing.

The blocks of a prompt of n tokens, by table index (h: hits, the longest path with a usable copy of every node):

    index          | 0 … h−1              | h … ⌊n/B⌋−1                    | ⌊n/B⌋ (if B does not divide n)
    block          | the cached copy      | fresh, sealed once computed    | fresh, the tail
    node           | exists, has a copy   | interned; sequence leads it    | none
    free blocks    | none needed; a copy  | one each                       | one
                   | on the free list     |                                |
                   | leaves it            |                                |

Of a worker with several groups this is true of each group's table and pool, with one h for all: every group has a usable copy of
every node up to h. A group with a window has only the last ⌈(w−1)/B⌉ of them, and in place of fresh blocks with an index it gets
its scratch blocks, as many as its ring has. A group with a state has only the last one, a snapshot. What it gets in a group with
cross attention has nothing to do with h: see groups/unit.py.

h ≤ ⌊(n−1)/B⌋: a full hit too leaves one token to compute, which gives the logits of the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from itertools import chain

from .fencing import Fencing, fenced
from .hits import hits_in
from .messages import DIGEST_BYTES, TOKEN_BYTES, AllocateItem, Boundary, Granted, Limits, Wait
from .prefix_tree import Leader, Node, PrefixTree
from .refusal import Reason, Refusal, bad_field
from .sequence import KeptBoundaries, Sequence, require_key
from .session import Session


def _check_item(session: Session, item: AllocateItem, limits: Limits) -> None:
    """Refuse what is malformed, belongs to another model, or can never fit into the pool."""
    root = item.root
    require_key(item.key, limits, "key")
    if root.model_fingerprint != session.registration.model_fingerprint:
        raise bad_field(
            "root.model_fingerprint",
            f"worker {session.worker_id!r} is registered with {session.registration.model_fingerprint!r}, "
            f"the sequence has {root.model_fingerprint!r}",
        )
    for name, text in (("root.adapter", root.adapter), ("root.tenant_salt", root.tenant_salt)):
        if text and len(text.encode()) > limits.max_name_bytes:
            raise bad_field(name, f"at most {limits.max_name_bytes} bytes, got {len(text.encode())}")
    if len(root.input_digest) not in (0, DIGEST_BYTES):
        raise bad_field("root.input_digest", f"needed nothing or a SHA-256 of 32 bytes, got {len(root.input_digest)}")
    num_tokens, rest = divmod(len(item.tokens), TOKEN_BYTES)
    if rest or not num_tokens:
        raise bad_field("tokens", f"needed one or more little-endian uint32 token ids, got {len(item.tokens)} bytes")
    if num_tokens + item.max_new_tokens > limits.max_tokens_per_sequence:
        raise bad_field(
            "tokens",
            f"{num_tokens} tokens and {item.max_new_tokens} new ones exceed the limit of "
            f"{limits.max_tokens_per_sequence} tokens per sequence",
        )
    # The KV of the last generated token is never computed.
    num_new_tokens = max(item.max_new_tokens, 1)
    num_blocks = -(-(num_tokens + num_new_tokens - 1) // session.block_size)
    if (
        num_blocks > session.most_blocks_per_sequence
        or num_tokens + item.max_new_tokens > session.account.budget.max_tokens
    ):
        raise session.never_fits(
            num_blocks,
            limits,
            needed=f"{num_tokens} prompt tokens and up to {num_new_tokens} new ones need {num_blocks} blocks of "
            f"{session.block_size}",
            cure="shorten the prompt, lower max_tokens",
            field="tokens",
        )
    for group in reversed(session.partial):
        group.check_item(item, num_blocks, session.worker_id)
    if item.num_encoder_tokens and not session.longest_input:
        raise bad_field(
            "num_encoder_tokens",
            f"worker {session.worker_id!r} is registered without a group with cross attention, got {item.num_encoder_tokens}",
        )
    if len(item.boundaries) > limits.max_asked_boundaries:
        raise bad_field("boundaries", f"at most {limits.max_asked_boundaries}, got {len(item.boundaries)}")


def _living(session: Session, root: Node | None, item: AllocateItem) -> Sequence | None:
    """The sequence if it lives here already in this round; refuses other rounds, other roots and other prompts."""
    key = item.key
    sequence = session.sequences.get((key.sequence_id, key.attempt))
    if sequence is None:
        return None
    if sequence.fenced:
        raise fenced(key)
    if key.round < sequence.key.round:
        raise Refusal(
            Reason.STALE_ROUND,
            f"round {key.round} of {key.sequence_id!r} is over: round {sequence.key.round} lives",
        )
    if key.round > sequence.key.round:
        raise Refusal(
            Reason.FREE_FIRST,
            f"round {sequence.key.round} of {key.sequence_id!r} still lives: Free it before allocating round {key.round}",
        )
    if sequence.root is not root or not sequence.tokens.startswith(item.tokens):
        raise Refusal(
            Reason.TOKENS_DIFFER,
            f"sequence {key.sequence_id!r} lives with another root or other tokens; use another sequence_id for another prompt",
            position=0,
        )
    for group in session.partial:
        group.check_length(item, len(sequence.tables[group.slot]))
    return sequence


def granted(session: Session, sequence: Sequence) -> Granted:
    """The present tables of a live sequence."""
    tables = tuple([group.granted(sequence) for group in session.by_slot])
    boundaries = tuple([one * session.block_size for one in sequence.boundaries]) if sequence.boundaries else ()
    return Granted(tables, sequence.num_cached_tokens, boundaries, sequence.encoder_computed)


def longest_run(leaders: Iterable[Leader], path: List[Node], begin: int, end: int, block_size: int) -> Wait | None:
    """The oldest of these leaders of path[begin] that computes the longest run of the path's nodes begin … end − 1.

    A leader of one node of its prompt leads all that follow, so a run is as long as the two paths are the same.
    """
    best: Leader | None = None
    reached = begin
    for leader in leaders:
        nodes = leader.nodes
        shorter = min(end, len(nodes))
        while reached < shorter and nodes[reached] is path[reached]:
            best = leader
            reached += 1
        if reached == end:
            break
    return None if best is None else Wait(best.key, reached * block_size)


def _prefix_in_flight(
    session: Session, item: AllocateItem, path: list[Node], num_hits: int, max_blocks: int, limits: Limits
) -> Wait | None:
    """The leader of the longest run of the path's nodes that follow the hits, if there is one. Another attempt of the sequence
    itself is no leader: granting this one fences it."""
    end = min(max_blocks, len(path))
    holder, sequence_id = session.holder, item.key.sequence_id
    if holder.dependent_slots:
        return _boundary_in_flight(session, sequence_id, path, num_hits, end, limits)
    if num_hits >= end or path[num_hits].leaders is None:
        return None
    leaders = (
        leader
        for leader in path[num_hits].iter_leaders()
        if leader.holder is holder and not leader.fenced and leader.key.sequence_id != sequence_id
    )
    return longest_run(leaders, path, num_hits, end, session.block_size)


def _boundary_in_flight(
    session: Session, sequence_id: str, path: list[Node], num_hits: int, end: int, limits: Limits
) -> Wait | None:
    """The leader of the deepest of the path's nodes that is being computed: where the path leaves what it computes, it names its
    windows, so that this prompt, and not only the one after it, hits there. A leader that does not know of this place is told."""
    for index in range(end - 1, num_hits - 1, -1):
        for leader in path[index].iter_leaders():
            if leader.holder is not session.holder or leader.fenced or leader.key.sequence_id == sequence_id:
                continue
            sequence = session.sequences[leader.key.sequence_id, leader.key.attempt]
            boundary = session.on_grid(index + 1)
            if boundary <= sequence.num_sealed:
                return None  # the place is not on the grid, and what it is rounded down to is computed already
            boundary = _add_boundary(session, sequence, boundary, limits)
            return Wait(leader.key, boundary * session.block_size) if boundary > num_hits else None
    return None


def _add_boundary(session: Session, sequence: Sequence, boundary: int, limits: Limits) -> int:
    """Make it a boundary of the sequence, which has not computed so far, if it may have one more; returns the last one up to it."""
    if boundary not in sequence.boundaries:
        if len(sequence.boundaries) < limits.max_boundaries and not session.downlink.is_full:
            sequence.boundaries = tuple(sorted((*sequence.boundaries, boundary)))
            session.downlink.push(Boundary(sequence.key, boundary * session.block_size))
        else:
            return max([one for one in sequence.boundaries if one <= boundary], default=0)
    return boundary


def _boundaries(
    session: Session, num_tokens: int, path: List[Node], num_hits: int, kept: KeptBoundaries, limits: Limits
) -> tuple[int, ...]:
    """Choose the boundaries at which a sequence is to name windows, in blocks, ascending: the end of its prompt, the point where
    it leaves the known tree if other prompts go on there, and those that the item asks for. If there are more than
    `limits.max_boundaries`, the last ones that the item asks for are left out."""
    last = session.on_grid((num_tokens - 1) // session.block_size)
    chosen: set[int] = set()
    is_junction = bool(path) and (path[-1].has_children or path[-1].leaders is not None)
    junction = session.on_grid(len(path)) if is_junction else last
    for boundary in chain((last, junction), kept.between(num_hits + 1, last)):
        if num_hits < boundary <= last:
            chosen.add(boundary)
        if len(chosen) == limits.max_boundaries:
            break
    return tuple(sorted(chosen))


def allocate(
    tree: PrefixTree,
    attempts: Fencing,
    session: Session,
    item: AllocateItem,
    generation: int,
    limits: Limits,
) -> Granted | Wait:
    """Grant one sequence its tables, or name the leader to wait for.

    Raises Refusal (having changed and evicted nothing): BAD_FIELD, NEVER_FITS, STALE_ATTEMPT, SEQUENCE_ELSEWHERE, STALE_ROUND,
    FREE_FIRST, TOKENS_DIFFER, TOO_MANY_SEQUENCES, NO_BLOCKS, TOO_MANY_BLOCKS, TOO_MANY_TOKENS.
    """
    _check_item(session, item, limits)
    attempts.check(item.key, session)
    block_size = session.block_size
    root = tree.find_root(item.root, block_size)
    living = _living(session, root, item)
    if living is not None:
        return granted(session, living)
    if len(session.sequences) >= limits.max_sequences_per_session:
        raise Refusal(
            Reason.TOO_MANY_SEQUENCES,
            f"worker {session.worker_id!r} has {len(session.sequences)} live sequences, the limit per worker: Free some first",
        )

    num_tokens = len(item.tokens) // TOKEN_BYTES
    max_hits = (num_tokens - 1) // block_size
    if item.max_cached_tokens is not None:
        max_hits = min(max_hits, item.max_cached_tokens // block_size)
    path = [] if root is None else tree.match(root, item.tokens, block_size, num_tokens // block_size)
    num_hits, hits = hits_in(session, item, root, path, max_hits)
    if not item.no_wait:
        wait = _prefix_in_flight(session, item, path, num_hits, max_hits, limits)
        for group in session.partial if wait is None else ():
            wait = wait or group.in_flight(item, root, hits[group.slot])
        if wait is not None:
            return wait

    num_blocks = -(-num_tokens // block_size)
    num_wanted = [num_blocks - num_hits] * len(hits)
    for group in session.partial:
        num_wanted[group.slot] = group.num_wanted(item, num_hits, hits[group.slot])
    session.require_available(num_wanted, hits)
    session.account.require_tokens(num_tokens)
    if root is None:
        root = tree.intern_root(item.root, block_size)
    sequence = Sequence(item.key, session, root, item.tokens)
    if session.dependents:
        interval = -(-item.retention_interval // (block_size * session.grid_blocks)) * session.grid_blocks
        sequence.kept = KeptBoundaries((session.on_grid(one // block_size) for one in item.boundaries), interval)
        sequence.boundaries = _boundaries(session, num_tokens, path, num_hits, sequence.kept, limits)
    # Pin the hits and count the sequence on its path before taking: taking evicts, and eviction prunes unused nodes.
    for pool in session.pools:
        pool.pin(*hits[pool.slot])
    tree.extend(path, root, item.tokens, block_size, num_tokens // block_size)
    (path[-1] if path else root).num_sequences += 1
    for node in path[num_hits:]:
        if node.leaders is None:  # nearly always: as `add_leader`, without the call
            node.leaders = sequence
        else:
            node.add_leader(sequence)
    sequence.nodes = path
    # In the order of the groups, as `require_available` has counted what is left of the budget.
    fresh = [pool.take_held(count, generation) for pool, count in zip(session.pools, num_wanted, strict=True)]
    sequence.tables = hits
    sequence.num_named = [num_blocks] * len(hits)
    for group in session.groups:
        group.enter(sequence, fresh[group.slot], num_hits)
    sequence.num_sealed = num_hits
    sequence.num_cached_tokens = sequence.num_computed_tokens = num_hits * block_size
    session.sequences[item.key.sequence_id, item.key.attempt] = sequence
    attempts.add(sequence)
    session.account.add_tokens(num_tokens)
    session.num_prompt_tokens += num_tokens + item.num_encoder_tokens
    session.num_cached_tokens += sequence.num_cached_tokens + item.num_encoder_tokens * sequence.encoder_computed
    if tree.journal is not None:
        deepest = path[num_hits - 1] if num_hits else None
        tree.journal.served(item.key, session.holder, deepest, sequence.num_cached_tokens, num_tokens)
    return granted(session, sequence)
