"""Allocate: look-up, pin and grant of one sequence, in one step that either happens whole or changes nothing.

The blocks of a prompt of n tokens, by table index (h: hits, the longest path with a usable copy of every node):

    index          | 0 … h−1              | h … ⌊n/B⌋−1                    | ⌊n/B⌋ (if B does not divide n)
    block          | the cached copy      | fresh, sealed once computed    | fresh, the tail
    node           | exists, has a copy   | interned; sequence leads it    | none
    free blocks    | none needed; a copy  | one each                       | one
                   | on the free list     |                                |
                   | leaves it            |                                |

h ≤ ⌊(n−1)/B⌋: also a full hit leaves at least one token to compute, which yields the logits of the next.
"""

from __future__ import annotations

from .block_pool import BlockPool
from .fencing import Fencing, fenced
from .messages import TOKEN_BYTES, AllocateItem, Granted, Limits, SequenceKey, Wait
from .prefix_tree import Leader, Node, PrefixTree
from .refusal import Reason, Refusal, bad_field
from .session import Sequence, Session


def check_key(key: SequenceKey, limits: Limits) -> None:
    """Refuse a malformed sequence key."""
    if not 1 <= len(key.sequence_id.encode()) <= limits.max_id_bytes:
        raise bad_field(
            "key.sequence_id", f"needed 1 to {limits.max_id_bytes} bytes, got {len(key.sequence_id.encode())}"
        )
    if key.attempt < 1:
        raise bad_field("key.attempt", "needed 1 or more: attempts are counted from 1")


def _check_item(session: Session, item: AllocateItem, limits: Limits) -> None:
    """Refuse what is malformed, belongs to another model, or can never fit into the pool."""
    check_key(item.key, limits)
    root = item.root
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
    pool = session.pool
    # The KV of the last generated token is never computed.
    num_slots = num_tokens + max(item.max_new_tokens, 1) - 1
    num_blocks = -(-num_slots // pool.block_size)
    if (
        num_blocks > session.most_blocks_per_sequence
        or num_tokens + item.max_new_tokens > session.account.budget.max_tokens
    ):
        raise _never_fits(session, num_tokens, max(item.max_new_tokens, 1), num_blocks, limits)


def _never_fits(session: Session, num_tokens: int, num_new_tokens: int, num_blocks: int, limits: Limits) -> Refusal:
    """The refusal of what no wait would help, with the limit that is the smallest."""
    there, cure = session.limit_exceeded(num_blocks, limits)
    return Refusal(
        Reason.NEVER_FITS,
        f"{num_tokens} prompt tokens and up to {num_new_tokens} new ones need {num_blocks} blocks of "
        f"{session.pool.block_size}; {there}: shorten the prompt, lower max_tokens, or {cure}",
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
    """The table of a live sequence as it stands."""
    pool = sequence.pool
    return Granted(tuple(sequence.table), tuple(map(pool.generation, sequence.table)), sequence.num_cached_tokens)


def _hits(path: list[Node], pool: BlockPool, max_blocks: int) -> list[int]:
    """Copies in `pool` along the path, up to the first node without one."""
    blocks: list[int] = []
    for node in path[:max_blocks]:
        block = node.copy_in(pool)
        if not block:
            break
        blocks.append(block)
    return blocks


def _prefix_in_flight(
    session: Session, item: AllocateItem, path: list[Node], num_hits: int, max_blocks: int
) -> Wait | None:
    """The oldest of the leaders that are computing the longest run of the path's nodes behind the hits, if any is.

    A leader of one node of its prompt leads all behind it, so a run is as long as the two paths are the same. Another attempt
    of the sequence itself is no leader: granting this one will fence it.
    """
    end = min(max_blocks, len(path))
    if num_hits >= end:
        return None
    best: Leader | None = None
    reached = num_hits
    for leader in path[num_hits].iter_leaders():
        if leader.pool is not session.pool or leader.fenced or leader.key.sequence_id == item.key.sequence_id:
            continue
        nodes = leader.nodes
        shorter = min(end, len(nodes))
        while reached < shorter and nodes[reached] is path[reached]:
            best = leader
            reached += 1
        if reached == end:
            break
    return None if best is None else Wait(best.key, reached * session.pool.block_size)


def allocate(
    tree: PrefixTree,
    attempts: Fencing,
    session: Session,
    item: AllocateItem,
    generation: int,
    limits: Limits,
) -> Granted | Wait:
    """Grant one sequence its table, or say whom to wait for.

    Raises Refusal (having changed and evicted nothing): BAD_FIELD, NEVER_FITS, STALE_ATTEMPT, SEQUENCE_ELSEWHERE, STALE_ROUND,
    FREE_FIRST, TOKENS_DIFFER, TOO_MANY_SEQUENCES, NO_BLOCKS, TOO_MANY_BLOCKS, TOO_MANY_TOKENS.
    """
    _check_item(session, item, limits)
    attempts.check(item.key, session)
    pool = session.pool
    block_size = pool.block_size
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
    hits = _hits(path, pool, max_hits)
    if not item.no_wait:
        wait = _prefix_in_flight(session, item, path, len(hits), max_hits)
        if wait is not None:
            return wait

    num_fresh = -(-num_tokens // block_size) - len(hits)
    num_available = pool.num_available - pool.num_cached_of(hits)
    if num_fresh > num_available:
        counts = pool.counts()
        if num_fresh <= num_available + counts.withheld:
            raise session.account.too_many_blocks(num_fresh - num_available + session.account.blocks_left)
        raise Refusal(
            Reason.NO_BLOCKS,
            f"needed {num_fresh} blocks beside {len(hits)} cached ones; worker {session.worker_id!r} has {counts.free} free "
            f"and {num_available - counts.free} evictable of {counts.capacity} ({counts.held} held, {counts.reserved} "
            "reserved): wait until sequences end, or give the worker more blocks (--num-blocks)",
        )

    if num_tokens > session.account.budget.tokens_left:
        raise session.account.too_many_tokens(num_tokens)

    if root is None:
        root = tree.intern_root(item.root, block_size)
    sequence = Sequence(item.key, session, root, item.tokens)
    # Pin and stand on the path before taking: taking evicts, and eviction prunes what nothing stands on.
    for block in hits:
        pool.pin(block)
    tree.extend(path, root, item.tokens, block_size, num_tokens // block_size)
    (path[-1] if path else root).num_sequences += 1
    for node in path[len(hits) :]:
        node.add_leader(sequence)
    sequence.nodes = path
    sequence.table = hits + pool.take_held(num_fresh, generation)
    sequence.num_named = len(sequence.table)
    sequence.num_sealed = len(hits)
    sequence.num_cached_tokens = sequence.num_computed_tokens = len(hits) * block_size
    session.sequences[item.key.sequence_id, item.key.attempt] = sequence
    attempts.add(sequence)
    session.account.add_tokens(num_tokens)
    session.num_prompt_tokens += num_tokens
    session.num_cached_tokens += sequence.num_cached_tokens
    return granted(sequence)
