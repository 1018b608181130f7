"""Append and Free: merging what a worker states of a sequence, sealing what is computed, releasing blocks.

An update is a statement of state that is merged, so that stating it again, or stating an older one later, is harmless. Every
check comes before the first change.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

from .fencing import Fencing, fenced
from .messages import TOKEN_BYTES, Appended, AppendItem, Limits, SequenceUpdate, TableEntry, Tables
from .prefix_tree import PrefixTree
from .refusal import Reason, Refusal, bad_field
from .session import Sequence, Session


class _Merge(NamedTuple):
    """An update that was checked and can be applied."""

    new_tokens: bytes
    bound: Tables
    new_blocks: list[list[int]]
    """Of these entries by group: the blocks that they add to the tables."""
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


def _new_blocks(sequence: Sequence, group: int, bound: tuple[TableEntry, ...]) -> list[int]:
    """The blocks that the update adds to a table; each block named must be that entry already, or be reserved here."""
    if not bound:
        return []
    pool, table = sequence.session.pools[group], sequence.tables[group]
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
            f"sequence {sequence.key.sequence_id!r} names block {block} of generation {generation} as entry {index} of group "
            f"{group}, but {found}: the worker's state is not the manager's; register again",
        )
    return list(blocks)


def _check(sequence: Sequence, update: SequenceUpdate, limits: Limits) -> _Merge:
    """Refuse a wrong update. Changes nothing."""
    new_tokens = _new_tokens(sequence, update, limits)
    session, bound, tables = sequence.session, update.bound, sequence.tables
    if len(bound) > len(tables):
        session.require_groups(len(bound), "bound")
    new_blocks: list[list[int]] = []
    for entries in bound:
        new_blocks.append(_new_blocks(sequence, len(new_blocks), entries))
    num_new_tokens = len(new_tokens) // TOKEN_BYTES
    session.account.require_tokens(num_new_tokens)
    if len(tables) == 1:
        shortest = longest = len(tables[0]) + (len(new_blocks[0]) if new_blocks else 0)
    else:
        lengths = [len(table) + len(new) for table, new in zip_longest(tables, new_blocks, fillvalue=())]
        shortest, longest = min(lengths), max(lengths)
    if longest > limits.max_blocks_per_sequence:
        raise bad_field(
            "bound",
            f"at most {limits.max_blocks_per_sequence} blocks per sequence, got {longest}: end the sequence, or register larger "
            "blocks",
        )
    num_computed = update.num_computed_tokens
    num_tokens = sequence.num_tokens + num_new_tokens
    num_slots = shortest * session.block_size
    if num_computed > num_tokens or num_computed > num_slots:
        raise bad_field(
            "num_computed_tokens",
            f"{num_computed} tokens cannot be computed: {num_tokens} are known and the table has {num_slots} slots",
        )
    return _Merge(new_tokens, bound, new_blocks, max(num_computed, sequence.num_computed_tokens))


def _apply(tree: PrefixTree, sequence: Sequence, merge: _Merge) -> None:
    """Apply a checked update, and seal the blocks that are full and computed now."""
    session = sequence.session
    new_tokens, bound, new_blocks, sequence.num_computed_tokens = merge
    if new_tokens:
        num_new_tokens = len(new_tokens) // TOKEN_BYTES
        sequence.tokens += new_tokens
        session.account.add_tokens(num_new_tokens)
        session.num_generated_tokens += num_new_tokens
    if bound:
        _bind(sequence, bound, new_blocks)
    if sequence.num_computed_tokens // session.block_size > sequence.num_sealed:
        _seal(tree, sequence)


def _bind(sequence: Sequence, bound: Tables, new_blocks: list[list[int]]) -> None:
    """Lengthen the tables by the blocks that checked entries add."""
    for group, blocks in enumerate(new_blocks):
        if blocks:
            pool, table = sequence.session.pools[group], sequence.tables[group]
            for block in blocks:
                pool.bind(block)
            table += blocks
            sequence.num_named[group] = len(table)  # named in order, up to the last one
        elif bound[group]:
            last = max(entry.table_index for entry in bound[group])
            sequence.num_named[group] = max(sequence.num_named[group], last + 1)


def _seal(tree: PrefixTree, sequence: Sequence) -> None:
    """Give every full computed block its node. From now on it is a hit for others and never changes."""
    session = sequence.session
    nodes, block_size = sequence.nodes, session.block_size
    num_full = sequence.num_computed_tokens // block_size
    if num_full > len(nodes):
        before = nodes[-1] if nodes else sequence.root
        tree.extend(nodes, sequence.root, sequence.tokens, block_size, num_full)
        # Generated blocks have no leader: their content is not known before.
        before.num_sequences -= 1
        nodes[-1].num_sequences += 1
    num_sealed = sequence.num_sealed
    pools, tables = session.pools, sequence.tables
    for index in range(num_sealed, num_full):
        node = nodes[index]
        tree.name(node)
        for pool in pools:
            pool.seal(tables[pool.slot][index], node)
        node.drop_leader(sequence)
    if tree.journal is not None:
        for pool, table in zip(pools, tables, strict=True):
            tree.journal.sealed(sequence.key, session.holder, pool.slot, nodes, table, num_sealed, num_full)
    sequence.num_sealed = num_full


def append(tree: PrefixTree, session: Session, item: AppendItem, generation: int, limits: Limits) -> Appended:
    """Merge an update of a live sequence and, if `want_blocks` asks for it, lengthen its table.

    Raises Refusal (having changed nothing): UNKNOWN_SEQUENCE, STALE_ROUND, STALE_ATTEMPT, GAP, TOKENS_DIFFER, STALE_GENERATION,
    BAD_FIELD, NEVER_FITS, NO_BLOCKS, TOO_MANY_BLOCKS, TOO_MANY_TOKENS.
    """
    sequence = _find(session, item.update)
    merge = _check(sequence, item.update, limits)
    if item.want_blocks > session.most_blocks_per_sequence:
        needed = f"a table of {item.want_blocks} blocks was wanted"
        raise session.never_fits(item.want_blocks, limits, needed=needed, cure="end the sequence", field="want_blocks")
    num_missing: list[int] = []
    if item.want_blocks:
        num_missing = [max(0, item.want_blocks - len(table)) for table in sequence.tables]
        for group, blocks in enumerate(merge.new_blocks):
            num_missing[group] = max(0, num_missing[group] - len(blocks))
        session.require_available(num_missing)
    _apply(tree, sequence, merge)
    num_sealed_tokens = sequence.num_sealed * session.block_size
    if not item.want_blocks:
        return Appended(num_sealed_tokens)
    entries = []
    for pool, table, count, num_named in zip(
        session.pools, sequence.tables, num_missing, sequence.num_named, strict=True
    ):
        if count:
            table += pool.take_held(count, generation)
        unnamed = range(num_named, len(table))
        entries.append(tuple(TableEntry(i, table[i], pool.generation(table[i])) for i in unnamed))
    return Appended(num_sealed_tokens, tuple(entries) if any(entries) else ())


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
    for pool, entries in zip(session.pools, update.bound, strict=False):
        for _, block, generation in entries:
            if pool.is_reserved(block, generation):
                pool.unreserve(block)


def end(tree: PrefixTree, attempts: Fencing, sequence: Sequence) -> None:
    """Release every table entry, the last block first: a prefix is evicted after its continuations."""
    for pool in sequence.session.pools:
        pool.release(*reversed(sequence.tables[pool.slot]))
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
    sequence.tables = ()
    del sequence.session.sequences[sequence.key.sequence_id, sequence.key.attempt]
    attempts.drop(sequence)
