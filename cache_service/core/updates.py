"""Append and Free: merging what a worker states of a sequence, sealing what is computed, releasing blocks.

An update is a statement of state that is merged, so that stating it again, or stating an older one later, is harmless. Every
check comes before the first change.
"""

from __future__ import annotations

from typing import NamedTuple

from .fencing import Fencing, fenced
from .messages import TOKEN_BYTES, Appended, AppendItem, Limits, SequenceUpdate, TableEntry
from .prefix_tree import PrefixTree
from .refusal import Reason, Refusal, bad_field
from .session import Sequence, Session


class _Merge(NamedTuple):
    """An update that was checked and can be applied."""

    new_tokens: bytes
    new_blocks: list[int]
    num_named: int
    num_computed_tokens: int


def _find(session: Session, update: SequenceUpdate) -> Sequence:
    """The live sequence that an Append means."""
    key = update.key
    sequence = session.sequences.get((key.sequence_id, key.attempt))
    if sequence is None or key.round > sequence.key.round:
        raise Refusal(
            Reason.UNKNOWN_SEQUENCE,
            f"no live sequence {key.sequence_id!r} attempt {key.attempt} round {key.round} on worker {session.worker_id!r}: "
            "Allocate it first",
        )
    if key.round < sequence.key.round:
        raise Refusal(
            Reason.STALE_ROUND,
            f"round {key.round} of {key.sequence_id!r} is over: round {sequence.key.round} lives",
        )
    if sequence.fenced:
        raise fenced(key)
    return sequence


def _new_tokens(sequence: Sequence, update: SequenceUpdate, limits: Limits) -> bytes:
    """The tokens that the update adds; those that overlap must be equal."""
    stated, start = update.tokens, update.start
    num_stated, rest = divmod(len(stated), TOKEN_BYTES)
    if rest:
        raise bad_field("tokens", f"needed little-endian uint32 token ids, got {len(stated)} bytes")
    known = sequence.num_tokens
    if start > known:
        raise Refusal(
            Reason.GAP,
            f"sequence {update.key.sequence_id!r} is known up to position {known}, the update begins at {start}: "
            f"state the tokens from {known} on",
            position=known,
        )
    if start + num_stated > limits.max_tokens_per_sequence:
        raise bad_field(
            "tokens",
            f"at most {limits.max_tokens_per_sequence} tokens per sequence, got {start + num_stated}: end the sequence",
        )
    if start == known:  # as nearly always: nothing is stated twice
        return stated
    overlap = min(known - start, num_stated) * TOKEN_BYTES
    begin = start * TOKEN_BYTES
    if sequence.tokens[begin : begin + overlap] != stated[:overlap]:
        position = next(
            start + i
            for i in range(overlap // TOKEN_BYTES)
            if sequence.tokens[begin + i * TOKEN_BYTES : begin + (i + 1) * TOKEN_BYTES]
            != stated[i * TOKEN_BYTES : (i + 1) * TOKEN_BYTES]
        )
        raise Refusal(
            Reason.TOKENS_DIFFER,
            f"sequence {update.key.sequence_id!r} is known with another token at position {position}: "
            "a sequence's tokens never change",
            position=position,
        )
    return stated[overlap:]


def _new_blocks(sequence: Sequence, bound: tuple[TableEntry, ...]) -> list[int]:
    """The blocks that the update adds to the table; each block named must be that entry already, or be reserved here."""
    if not bound:
        return []
    pool = sequence.pool
    table = sequence.table
    blocks: dict[int, None] = {}
    for index, block, generation in bound:
        if index < len(table):
            if table[index] == block and pool.generation(block) == generation:
                continue
            found = f"entry {index} is block {table[index]} of generation {pool.generation(table[index])}"
        elif index == len(table) + len(blocks) and pool.is_reserved(block, generation) and block not in blocks:
            blocks[block] = None
            continue
        else:
            found = (
                f"the table has {len(table) + len(blocks)} entries and the block is not reserved with that generation"
            )
        raise Refusal(
            Reason.STALE_GENERATION,
            f"sequence {sequence.key.sequence_id!r} names block {block} of generation {generation} as entry {index}, but "
            f"{found}: the worker's state is not the manager's; register again",
        )
    return list(blocks)


def _check(sequence: Sequence, update: SequenceUpdate, limits: Limits) -> _Merge:
    """Refuse a wrong update. Changes nothing."""
    new_tokens = _new_tokens(sequence, update, limits)
    new_blocks = _new_blocks(sequence, update.bound)
    num_new_tokens = len(new_tokens) // TOKEN_BYTES
    sequence.session.account.require_tokens(num_new_tokens)
    num_blocks = len(sequence.table) + len(new_blocks)
    if num_blocks > limits.max_blocks_per_sequence:
        raise bad_field(
            "bound",
            f"at most {limits.max_blocks_per_sequence} blocks per sequence, got {num_blocks}: end the sequence, or register larger "
            "blocks",
        )
    num_computed = update.num_computed_tokens
    num_tokens = sequence.num_tokens + num_new_tokens
    num_slots = num_blocks * sequence.pool.block_size
    if num_computed > num_tokens or num_computed > num_slots:
        raise bad_field(
            "num_computed_tokens",
            f"{num_computed} tokens cannot be computed: {num_tokens} are known and the table has {num_slots} slots",
        )
    num_named = sequence.num_named
    if new_blocks:
        num_named = num_blocks  # new entries are named in order, up to the last one
    elif update.bound:
        num_named = max(num_named, max(entry.table_index for entry in update.bound) + 1)
    return _Merge(new_tokens, new_blocks, num_named, max(num_computed, sequence.num_computed_tokens))


def _apply(tree: PrefixTree, sequence: Sequence, merge: _Merge) -> None:
    """Apply a checked update, and seal the blocks that are full and computed now."""
    pool = sequence.pool
    new_tokens, new_blocks, sequence.num_named, sequence.num_computed_tokens = merge
    if new_tokens:
        session = sequence.session
        num_new_tokens = len(new_tokens) // TOKEN_BYTES
        sequence.tokens += new_tokens
        session.account.add_tokens(num_new_tokens)
        session.num_generated_tokens += num_new_tokens
    if new_blocks:
        for block in new_blocks:
            pool.bind(block)
        sequence.table += new_blocks
    _seal(tree, sequence)


def _seal(tree: PrefixTree, sequence: Sequence) -> None:
    """Give every full computed block its node. From now on it is a hit for others and never changes."""
    pool = sequence.pool
    nodes = sequence.nodes
    num_full = sequence.num_computed_tokens // pool.block_size
    if num_full > len(nodes):
        before = nodes[-1] if nodes else sequence.root
        tree.extend(nodes, sequence.root, sequence.tokens, pool.block_size, num_full)
        # Generated blocks have no leader: their content is not known before.
        before.num_sequences -= 1
        nodes[-1].num_sequences += 1
    for index in range(sequence.num_sealed, num_full):
        node = nodes[index]
        tree.name(node)
        pool.seal(sequence.table[index], node)
        node.drop_leader(sequence)
    if tree.journal is not None and num_full > sequence.num_sealed:
        tree.journal.sealed(sequence.key, pool, nodes, sequence.table, sequence.num_sealed, num_full)
    sequence.num_sealed = max(sequence.num_sealed, num_full)


def append(tree: PrefixTree, session: Session, item: AppendItem, generation: int, limits: Limits) -> Appended:
    """Merge an update of a live sequence and, if `want_blocks` asks for it, lengthen its table.

    Raises Refusal (having changed nothing): UNKNOWN_SEQUENCE, STALE_ROUND, STALE_ATTEMPT, GAP, TOKENS_DIFFER, STALE_GENERATION,
    BAD_FIELD, NEVER_FITS, NO_BLOCKS, TOO_MANY_BLOCKS, TOO_MANY_TOKENS.
    """
    sequence = _find(session, item.update)
    merge = _check(sequence, item.update, limits)
    pool = session.pool
    if item.want_blocks > session.most_blocks_per_sequence:
        needed = f"a table of {item.want_blocks} blocks was wanted"
        raise session.never_fits(item.want_blocks, limits, needed=needed, cure="end the sequence", field="want_blocks")
    num_missing = item.want_blocks - len(sequence.table) - len(merge.new_blocks)
    if num_missing > 0:
        session.require_available(num_missing)
    _apply(tree, sequence, merge)
    if num_missing > 0:
        sequence.table += pool.take_held(num_missing, generation)
    if not item.want_blocks:
        return Appended(sequence.num_sealed * pool.block_size)
    unnamed = range(sequence.num_named, len(sequence.table))
    return Appended(
        sequence.num_sealed * pool.block_size,
        tuple(TableEntry(i, sequence.table[i], pool.generation(sequence.table[i])) for i in unnamed),
    )


def free(tree: PrefixTree, attempts: Fencing, session: Session, update: SequenceUpdate, limits: Limits) -> None:
    """Merge the update if it is consistent, then end the sequence unless a newer round of it lives. Idempotent; never refuses.

    Named blocks that are still in the reserve with that generation go back to the free list; other blocks named are ignored.
    """
    key = update.key
    sequence = session.sequences.get((key.sequence_id, key.attempt))
    if sequence is not None and sequence.key.round <= key.round:
        if sequence.key.round == key.round:
            try:
                merge = _check(sequence, update, limits)
            except Refusal:
                pass  # Free never fails: what is not consistent is not sealed.
            else:
                _apply(tree, sequence, merge)
        end(tree, attempts, sequence)
    for _, block, generation in update.bound:
        if session.pool.is_reserved(block, generation):
            session.pool.unreserve(block)


def end(tree: PrefixTree, attempts: Fencing, sequence: Sequence) -> None:
    """Release every table entry, the last block first: a prefix is evicted after its continuations."""
    pool = sequence.pool
    for block in reversed(sequence.table):
        pool.release(block)
    leave(tree, attempts, sequence)


def leave(tree: PrefixTree, attempts: Fencing, sequence: Sequence) -> None:
    """Remove a sequence from the tree and the indexes. Its blocks stay as they are."""
    nodes = sequence.nodes
    for node in nodes[sequence.num_sealed :]:
        node.drop_leader(sequence)
    deepest = nodes[-1] if nodes else sequence.root
    deepest.num_sequences -= 1
    tree.prune(deepest)
    sequence.session.account.add_tokens(-sequence.num_tokens)
    sequence.nodes = []
    sequence.table = []
    del sequence.session.sequences[sequence.key.sequence_id, sequence.key.attempt]
    attempts.drop(sequence)
