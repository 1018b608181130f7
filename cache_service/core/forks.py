"""Fork: a worker states that a sequence goes on from where another one is, and that both have the same first blocks.

A fork of a parent, by table index (s: shared blocks, all of them sealed; c: full blocks that the fork has computed):

    index          | 0 … s−1                | s … c−1                  | c …
    block          | the parent's, pinned   | of the reserve, sealed   | of the reserve
    node           | the parent's           | interned                 | none

It is no question: the worker has made the fork, and both may have gone on since. So it is taken in like an update, in the order in
which the worker states it, and what is stated again is merged. No blocks are granted, so nothing is evicted.
"""

from __future__ import annotations

from .fencing import Fencing
from .messages import TOKEN_BYTES, Appended, AppendItem, ForkItem, Limits
from .prefix_tree import PrefixTree
from .refusal import Reason, Refusal
from .sequence import Sequence, require_key
from .session import Session
from .updates import Merge, append, apply, check, find, num_common


def fork(tree: PrefixTree, attempts: Fencing, session: Session, item: ForkItem, limits: Limits) -> Appended:
    """Take in one fork, or what is stated of it again.

    Raises Refusal (having changed nothing): BAD_FIELD, STALE_ATTEMPT, SEQUENCE_ELSEWHERE, FREE_FIRST, UNKNOWN_SEQUENCE,
    STALE_ROUND, GAP, TOKENS_DIFFER, STALE_GENERATION, TOO_MANY_SEQUENCES, TOO_MANY_TOKENS.
    """
    key = item.update.key
    require_key(key, limits, "update.key")
    attempts.check(key, session)
    living = session.sequences.get((key.sequence_id, key.attempt))
    if living is not None:
        if key.round > living.key.round:
            raise Refusal(
                Reason.FREE_FIRST,
                f"round {living.key.round} of {key.sequence_id!r} still lives: Free it before round {key.round} is forked",
            )
        return append(tree, session, AppendItem(item.update), 0, limits)
    parent = find(session, item.parent)
    if len(session.sequences) >= limits.max_sequences_per_session:
        raise Refusal(
            Reason.TOO_MANY_SEQUENCES,
            f"worker {session.worker_id!r} has {len(session.sequences)} live sequences, the limit per worker: Free some first",
        )
    if item.num_shared_blocks > parent.num_sealed:
        position = parent.num_sealed * session.block_size
        raise Refusal(
            Reason.GAP,
            f"{item.num_shared_blocks} blocks of {session.block_size} tokens of {parent.key.sequence_id!r} are to be shared, and "
            f"it is known to have computed {position} tokens: Append what it has computed first",
            position=position,
        )
    child = _begin(session, parent, item)
    merge = check(session, child, item.update, limits)
    session.account.require_tokens(child.num_tokens + len(merge.new_tokens) // TOKEN_BYTES)
    _enter(tree, attempts, session, parent, child, merge)
    return Appended(child.num_sealed * session.block_size)


def _begin(session: Session, parent: Sequence, item: ForkItem) -> Sequence:
    """The fork as it was made, with what it shares. Nothing knows of it yet."""
    num_shared = item.num_shared_blocks
    num_tokens = num_shared * session.block_size
    child = Sequence(item.update.key, session, parent.root, bytes(parent.tokens[: num_tokens * TOKEN_BYTES]))
    child.tables = [group.fork(parent, num_shared) for group in session.by_slot]
    child.encoder_computed = parent.encoder_computed
    child.kept = parent.kept
    child.nodes = parent.nodes[:num_shared]
    child.num_sealed, child.num_computed_tokens = num_shared, num_tokens
    child.num_named = list(map(len, child.tables))
    return child


def _enter(
    tree: PrefixTree, attempts: Fencing, session: Session, parent: Sequence, child: Sequence, merge: Merge
) -> None:
    key = child.key
    for group in session.groups:
        group.pool.pin(*group.blocks(child))
    (child.nodes[-1] if child.nodes else child.root).num_sequences += 1
    session.sequences[key.sequence_id, key.attempt] = child
    attempts.add(child)
    session.account.add_tokens(child.num_tokens)
    num_generated = session.num_generated_tokens
    begin = len(child.tokens)
    apply(tree, session, child, merge)
    # What the parent has computed and the fork was given a copy of is not generated twice.
    num_copied = num_common(child.tokens[begin:], parent.tokens[begin:])
    session.num_generated_tokens = max(num_generated, session.num_generated_tokens - num_copied)
