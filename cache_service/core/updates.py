"""Append and Free, and what Fork has of them: merging what a worker states, sealing what is computed, releasing blocks.

An update is a statement of state that is merged, so that stating it again, or stating an older one later, is harmless. Every
check comes before the first change.
"""

from __future__ import annotations

from typing import NamedTuple

from .fencing import Fencing, fenced
from .messages import (
    TOKEN_BYTES,
    Appended,
    AppendItem,
    Blocks,
    Limits,
    SequenceKey,
    SequenceUpdate,
    TableEntry,
    Tables,
)
from .prefix_tree import PrefixTree
from .refusal import Reason, Refusal, bad_field
from .sequence import Sequence
from .session import Session


class Merge(NamedTuple):
    """An update that was checked and can be applied."""

    new_tokens: bytes
    update: SequenceUpdate
    new_blocks: list[list[int]]
    """The blocks that the update's `bound` adds to the tables, by group."""
    num_computed_tokens: int


def find(session: Session, key: SequenceKey) -> Sequence:
    """The live sequence that an Append means, or a Fork of it. Raises Refusal: UNKNOWN_SEQUENCE, STALE_ROUND, STALE_ATTEMPT."""
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


def num_common(one: bytes | bytearray, other: bytes | bytearray) -> int:
    """Leading tokens that are the same."""
    count = 0
    for begin in range(0, min(len(one), len(other)), TOKEN_BYTES):
        if one[begin : begin + TOKEN_BYTES] != other[begin : begin + TOKEN_BYTES]:
            break
        count += 1
    return count


def _new_tokens(sequence: Sequence, known: int, update: SequenceUpdate, limits: Limits) -> bytes:
    """The tokens that the update adds to the `known` ones; those that overlap must be equal."""
    stated, start = update.tokens, update.start
    num_stated = len(stated) // TOKEN_BYTES
    if len(stated) % TOKEN_BYTES:
        raise bad_field("tokens", f"needed little-endian uint32 token ids, got {len(stated)} bytes")
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
        position = start + num_common(sequence.tokens[begin : begin + overlap], stated)
        raise Refusal(
            Reason.TOKENS_DIFFER,
            f"sequence {update.key.sequence_id!r} is known with another token at position {position}: "
            "a sequence's tokens never change",
            position=position,
        )
    return stated[overlap:]


def check(session: Session, sequence: Sequence, update: SequenceUpdate, limits: Limits) -> Merge:
    """Refuse a wrong update. Changes nothing."""
    num_tokens = sequence.num_tokens
    new_tokens = _new_tokens(sequence, num_tokens, update, limits)
    bound, tables = update.bound, sequence.tables
    if len(bound) > len(tables):
        session.require_groups(len(bound), "bound")
    new_blocks: list[list[int]] = []
    for slot, entries in enumerate(bound):
        new_blocks.append(session.by_slot[slot].new_blocks(sequence, entries))
    num_new_tokens = len(new_tokens) // TOKEN_BYTES
    session.account.require_tokens(num_new_tokens)
    longest, shortest = 0, limits.max_blocks_per_sequence
    for group in session.whole:  # without any, only the tokens bound what is computed
        length = len(tables[group.slot])
        if group.slot < len(new_blocks):
            length += len(new_blocks[group.slot])
        if length > longest:
            longest = length
        if length < shortest:
            shortest = length
    if longest > limits.max_blocks_per_sequence:
        raise bad_field(
            "bound",
            f"at most {limits.max_blocks_per_sequence} blocks per sequence, got {longest}: end the sequence, or register larger "
            "blocks",
        )
    num_computed = update.num_computed_tokens
    num_tokens += num_new_tokens
    num_slots = shortest * session.block_size
    if num_computed > num_tokens or num_computed > num_slots:
        raise bad_field(
            "num_computed_tokens",
            f"{num_computed} tokens cannot be computed: {num_tokens} are known and the table has {num_slots} slots",
        )
    if num_computed < sequence.num_computed_tokens:
        num_computed = sequence.num_computed_tokens
    if update.scratch or update.released:
        session.require_groups(max(len(update.scratch), len(update.released)), "scratch")
        for name, stated in (("scratch", update.scratch), ("released", update.released)):
            for group in session.by_slot[: len(stated)]:
                if stated[group.slot] and not group.is_dependent:
                    raise bad_field(
                        name, f"group {group.slot} has no window: its sequences have no scratch and release nothing"
                    )
    for group in session.partial:
        group.check(sequence, update, num_computed)
    if update.encoder_computed and not session.longest_input:
        raise bad_field(
            "encoder_computed", f"worker {session.worker_id!r} is registered without a group with cross attention"
        )
    return Merge(new_tokens, update, new_blocks, num_computed)


def apply(tree: PrefixTree, session: Session, sequence: Sequence, merge: Merge) -> None:
    """Apply a checked update, and seal the blocks that are full and computed now."""
    new_tokens, update, new_blocks, sequence.num_computed_tokens = merge
    if new_tokens:
        num_new_tokens = len(new_tokens) // TOKEN_BYTES
        sequence.tokens += new_tokens
        session.account.add_tokens(num_new_tokens)
        session.num_generated_tokens += num_new_tokens
    for slot, blocks in enumerate(new_blocks):
        if blocks:
            table = sequence.tables[slot]
            session.pools[slot].bind(*blocks)
            table += blocks
            sequence.num_named[slot] = len(table)  # named in order, up to the last one
        elif update.bound[slot] and session.by_slot[slot].is_whole:
            last = max(entry.table_index for entry in update.bound[slot])
            sequence.num_named[slot] = max(sequence.num_named[slot], last + 1)
    if sequence.num_computed_tokens // session.block_size > sequence.num_sealed:
        _seal(tree, session, sequence)
    for group in session.partial:
        group.apply(tree, sequence, update)
    if sequence.boundaries:
        sequence.boundaries = tuple([one for one in sequence.boundaries if one > sequence.num_sealed])


def _seal(tree: PrefixTree, session: Session, sequence: Sequence) -> None:
    """Give every full computed block its node. From now on it is a hit for others and never changes."""
    nodes, block_size = sequence.nodes, session.block_size
    num_full = sequence.num_computed_tokens // block_size
    if num_full > len(nodes):
        before = nodes[-1] if nodes else sequence.root
        tree.extend(nodes, sequence.root, sequence.tokens, block_size, num_full)
        # Generated blocks have no leader: their content is not known before.
        before.num_sequences -= 1
        nodes[-1].num_sequences += 1
    num_sealed = sequence.num_sealed
    pools, tables = session.whole_pools, sequence.tables
    for index in range(num_sealed, num_full):
        node = nodes[index]
        if node.block_hash is None:
            tree.name(node)
        for pool in pools:
            pool.seal(tables[pool.slot][index], node)
        if node.leaders is not None:
            node.drop_leader(sequence)
    if tree.journal is not None:
        for pool in pools:
            tree.journal.sealed(sequence.key, session.holder, pool.slot, nodes, tables[pool.slot], num_sealed, num_full)
    sequence.num_sealed = num_full


def append(tree: PrefixTree, session: Session, item: AppendItem, generation: int, limits: Limits) -> Appended:
    """Merge an update of a live sequence and, if `want_blocks` asks for it, lengthen its table.

    Raises Refusal (having changed nothing): UNKNOWN_SEQUENCE, STALE_ROUND, STALE_ATTEMPT, GAP, TOKENS_DIFFER, STALE_GENERATION,
    BAD_FIELD, NEVER_FITS, NO_BLOCKS, TOO_MANY_BLOCKS, TOO_MANY_TOKENS.
    """
    sequence = find(session, item.update.key)
    merge = check(session, sequence, item.update, limits)
    if item.want_blocks > session.most_blocks_per_sequence:
        needed = f"a table of {item.want_blocks} blocks was wanted"
        raise session.never_fits(item.want_blocks, limits, needed=needed, cure="end the sequence", field="want_blocks")
    num_missing: list[int] = []
    if item.want_blocks:
        num_missing = [0] * len(sequence.tables)
        for group in session.whole:
            num_new = len(merge.new_blocks[group.slot]) if group.slot < len(merge.new_blocks) else 0
            num_missing[group.slot] = max(0, item.want_blocks - len(sequence.tables[group.slot]) - num_new)
        session.require_available(num_missing)
    apply(tree, session, sequence, merge)
    num_sealed_tokens = sequence.num_sealed * session.block_size
    if not item.want_blocks:
        return Appended(num_sealed_tokens)
    entries: list[tuple[TableEntry, ...]] = [()] * len(num_missing)
    for group in session.whole:
        slot, pool, table = group.slot, group.pool, sequence.tables[group.slot]
        table += pool.take_held(num_missing[slot], generation)
        unnamed = range(sequence.num_named[slot], len(table))
        entries[slot] = tuple(TableEntry(i, table[i], pool.generation(table[i])) for i in unnamed)
    return Appended(num_sealed_tokens, tuple(entries) if any(entries) else ())


def free(tree: PrefixTree, attempts: Fencing, session: Session, update: SequenceUpdate, limits: Limits) -> None:
    """Merge the update if it is consistent, then end the sequence unless a newer round of it lives. Idempotent; never refuses.

    Blocks named, in any field, that are still in the reserve with that generation go back to the free list; others are ignored.
    """
    key = update.key
    sequence = session.sequences.get((key.sequence_id, key.attempt))
    if sequence is not None and sequence.key.round <= key.round:
        if sequence.key.round == key.round:
            try:
                merge = check(session, sequence, update, limits)
            except Refusal:
                pass  # Free never fails: what is not consistent is not sealed.
            else:
                apply(tree, session, sequence, merge)
        end(tree, attempts, session, sequence)
    statements: tuple[Tables | Blocks, ...] = (update.bound, update.scratch, update.released)
    for stated in statements:
        for group in session.by_slot[: len(stated)]:
            for entry in stated[group.slot]:
                group.pool.unreserve(entry.block, entry.generation)


def end(tree: PrefixTree, attempts: Fencing, session: Session, sequence: Sequence) -> None:
    """Release every table entry, the last block first: a prefix is evicted after its continuations."""
    for group in session.groups:
        group.release(sequence)
    leave(tree, attempts, session, sequence)


def leave(tree: PrefixTree, attempts: Fencing, session: Session, sequence: Sequence) -> None:
    """Remove a sequence from the tree and the indexes. Its blocks stay as they are."""
    nodes = sequence.nodes
    for node in nodes[sequence.num_sealed :]:
        node.drop_leader(sequence)
    for group in session.partial:
        group.leave(sequence)
    deepest = nodes[-1] if nodes else sequence.root
    deepest.num_sequences -= 1
    tree.prune(deepest)
    session.account.add_tokens(-sequence.num_tokens)
    sequence.nodes = []
    sequence.tables = []
    del session.sequences[sequence.key.sequence_id, sequence.key.attempt]
    attempts.drop(sequence)
