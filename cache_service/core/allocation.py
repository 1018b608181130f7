"""Allocate: look-up, pin and grant of one sequence, in one step that happens as a whole or changes nothing.

The blocks of a prompt of n tokens, by table index (h: hits, the longest path with a usable copy of every node):

    index          | 0 … h−1              | h … ⌊n/B⌋−1                    | ⌊n/B⌋ (if B does not divide n)
    block          | the cached copy      | fresh, sealed once computed    | fresh, the tail
    node           | exists, has a copy   | interned; sequence leads it    | none
    free blocks    | none needed; a copy  | one each                       | one
                   | on the free list     |                                |
                   | leaves it            |                                |

Of a worker with several groups this is true of each group's table and pool, with one h for all: every group has a usable copy of
every node up to h.

h ≤ ⌊(n−1)/B⌋: a full hit too leaves one token to compute, which gives the logits of the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List

from .copies import SLOT_BITS, SLOT_MASK, Holder
from .fencing import Fencing, fenced
from .messages import TOKEN_BYTES, AllocateItem, Granted, GrantedTable, Limits, Wait
from .prefix_tree import Leader, Node, PrefixTree
from .refusal import Reason, Refusal, bad_field
from .session import Sequence, Session


def _check_item(session: Session, item: AllocateItem, limits: Limits) -> None:
    """Refuse what is malformed, belongs to another model, or can never fit into the pool."""
    num_id_bytes, root = len(item.key.sequence_id.encode()), item.root
    if not 1 <= num_id_bytes <= limits.max_id_bytes:
        raise bad_field("key.sequence_id", f"needed 1 to {limits.max_id_bytes} bytes, got {num_id_bytes}")
    if item.key.attempt < 1:
        raise bad_field("key.attempt", "needed 1 or more: attempts are counted from 1")
    if root.model_fingerprint != session.registration.model_fingerprint:
        raise bad_field(
            "root.model_fingerprint",
            f"worker {session.worker_id!r} is registered with {session.registration.model_fingerprint!r}, "
            f"the sequence has {root.model_fingerprint!r}",
        )
    for name, text in (("root.adapter", root.adapter), ("root.tenant_salt", root.tenant_salt)):
        if len(text.encode()) > limits.max_name_bytes:
            raise bad_field(name, f"at most {limits.max_name_bytes} bytes, got {len(text.encode())}")
    if len(root.input_digest) not in (0, 32):
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
    return sequence


def granted(sequence: Sequence) -> Granted:
    """The present tables of a live sequence."""
    pools = sequence.session.pools
    tables = [GrantedTable(tuple(table), pools[i].generations(table)) for i, table in enumerate(sequence.tables)]
    return Granted(tuple(tables), sequence.num_cached_tokens)


def hits_in(path: List[Node], holder: Holder, max_blocks: int) -> tuple[list[int], ...]:
    """By slot: the holder's copies along the path, up to the first node that some slot has none of."""
    found: list[int] = []
    for node in path[:max_blocks]:
        blocks = node.copy_blocks if node.copy_holder is holder else node.blocks_in(holder)
        if not blocks:
            break
        found.append(blocks)
    num_slots = len(holder.signatures)
    if num_slots == 1:
        return (found,)
    hits = tuple([blocks >> slot * SLOT_BITS & SLOT_MASK for blocks in found] for slot in range(num_slots))
    num_hits = min(one.index(0) if 0 in one else len(one) for one in hits)
    return tuple(one[:num_hits] for one in hits)


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
    session: Session, item: AllocateItem, path: list[Node], num_hits: int, max_blocks: int
) -> Wait | None:
    """The leader of the longest run of the path's nodes that follow the hits, if there is one. Another attempt of the sequence
    itself is no leader: granting this one fences it."""
    end = min(max_blocks, len(path))
    if num_hits >= end or path[num_hits].leaders is None:
        return None
    holder, sequence_id = session.holder, item.key.sequence_id
    leaders = (
        leader
        for leader in path[num_hits].iter_leaders()
        if leader.holder is holder and not leader.fenced and leader.key.sequence_id != sequence_id
    )
    return longest_run(leaders, path, num_hits, end, session.block_size)


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
        return granted(living)
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
    hits = hits_in(path, session.holder, max_hits)
    num_hits = len(hits[0])
    if not item.no_wait:
        wait = _prefix_in_flight(session, item, path, num_hits, max_hits)
        if wait is not None:
            return wait

    num_fresh = -(-num_tokens // block_size) - num_hits
    session.require_available([num_fresh] * len(hits), hits)
    session.account.require_tokens(num_tokens)

    if root is None:
        root = tree.intern_root(item.root, block_size)
    sequence = Sequence(item.key, session, root, item.tokens)
    # Pin the hits and count the sequence on its path before taking: taking evicts, and eviction prunes unused nodes.
    for pool in session.pools:
        pool.pin(*hits[pool.slot])
    tree.extend(path, root, item.tokens, block_size, num_tokens // block_size)
    (path[-1] if path else root).num_sequences += 1
    for node in path[num_hits:]:
        node.add_leader(sequence)
    sequence.nodes = path
    for pool in session.pools:
        hits[pool.slot].extend(pool.take_held(num_fresh, generation))
    sequence.tables = hits
    sequence.num_named = [num_hits + num_fresh] * len(hits)
    sequence.num_sealed = num_hits
    sequence.num_cached_tokens = sequence.num_computed_tokens = num_hits * block_size
    session.sequences[item.key.sequence_id, item.key.attempt] = sequence
    attempts.add(sequence)
    session.account.add_tokens(num_tokens)
    session.num_prompt_tokens += num_tokens
    session.num_cached_tokens += sequence.num_cached_tokens
    if tree.journal is not None:
        deepest = path[num_hits - 1] if num_hits else None
        tree.journal.served(item.key, session.holder, deepest, sequence.num_cached_tokens, num_tokens)
    return granted(sequence)
