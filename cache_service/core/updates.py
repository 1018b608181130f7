"""Append and Free, and what Fork has of them: merging what a worker states, sealing what is computed, releasing blocks.

An update is a statement of state that is merged, so that stating it again, or stating an older one later, is harmless. Every
check comes before the first change.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from . import units
from .block_pool import BlockPool
from .fencing import Fencing, fenced
from .messages import (
    TOKEN_BYTES,
    Appended,
    AppendItem,
    Limits,
    ReservedBlock,
    SequenceKey,
    SequenceUpdate,
    TableEntry,
    Tables,
)
from .prefix_tree import PrefixTree
from .refusal import Reason, Refusal, bad_field
from .session import Sequence, Session
from .windows import WindowTable


class Merge(NamedTuple):
    """An update that was checked and can be applied."""

    new_tokens: bytes
    update: SequenceUpdate
    new_blocks: list[list[int]]
    """Of its `bound`, by group: the blocks that are added to the tables; empty for groups with a window."""
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


def _check_window(sequence: Sequence, group: int, update: SequenceUpdate, num_full: int) -> None:
    """Refuse what an update states of a group with a window, if a block is not where it must be. What the same update releases may
    be gone already: an earlier call, whose answer was lost, has released it."""
    window, pool = sequence.windows[group], sequence.session.pools[group]
    assert window is not None
    released = {(block, generation) for _, block, generation in _of_group(update.released, group)}
    named: set[int] = set()
    for index, block, generation in _of_group(update.bound, group):
        if index >= num_full:
            raise bad_field(
                "bound",
                f"entry {index} of group {group} is named as part of a window, but only {num_full} blocks are computed",
            )
        is_known = pool.generation(block) == generation
        if is_known and window.entries.get(index) == block:
            continue
        is_own = is_known and (block in window.scratch or pool.is_reserved(block, generation))
        if is_own and block not in named and (index not in window.entries or (block, generation) in released):
            named.add(block)
        elif (block, generation) not in released:
            raise _not_its_own(sequence, group, f"as entry {index}", block, generation)
    for block, generation in _of_group(update.scratch, group):
        is_known = pool.generation(block) == generation
        is_own = is_known and (block in window.scratch or pool.is_reserved(block, generation))
        if (not is_own or block in named) and (block, generation) not in released:
            raise _not_its_own(sequence, group, "as a scratch block", block, generation)


def _not_its_own(sequence: Sequence, group: int, place: str, block: int, generation: int) -> Refusal:
    return Refusal(
        Reason.STALE_GENERATION,
        f"sequence {sequence.key.sequence_id!r} names block {block} of generation {generation} {place} of group {group}, but the "
        "block is not there, and neither its scratch nor reserved with that generation: the worker's state is not the manager's; "
        "register again",
    )


_Entry = TypeVar("_Entry", TableEntry, ReservedBlock)


def _of_group(groups: tuple[tuple[_Entry, ...], ...], group: int) -> tuple[_Entry, ...]:
    return groups[group] if group < len(groups) else ()


def check(sequence: Sequence, update: SequenceUpdate, limits: Limits) -> Merge:
    """Refuse a wrong update. Changes nothing."""
    num_tokens = sequence.num_tokens
    new_tokens = _new_tokens(sequence, num_tokens, update, limits)
    session, bound, tables, windows = sequence.session, update.bound, sequence.tables, sequence.windows
    if len(bound) > len(tables):
        session.require_groups(len(bound), "bound")
    new_blocks: list[list[int]] = []
    for group, entries in enumerate(bound):
        new_blocks.append([] if windows and windows[group] is not None else _new_blocks(sequence, group, entries))
    num_new_tokens = len(new_tokens) // TOKEN_BYTES
    session.account.require_tokens(num_new_tokens)
    if len(tables) == 1 and not windows:
        shortest = longest = len(tables[0]) + (len(new_blocks[0]) if new_blocks else 0)
    else:
        lengths = [len(tables[slot]) + len(_at(new_blocks, slot)) for slot in session.holder.full_slots]
        # Without a table of the whole sequence, only its tokens bound what is computed.
        shortest = min(lengths, default=limits.max_blocks_per_sequence)
        longest = max(lengths, default=0)
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
    if session.unit_pool is not None or update.encoder_computed:
        units.check_update(sequence, update, num_computed)
    if windows or update.scratch or update.released:
        _check_windows(sequence, update, num_computed // session.block_size, limits)
    return Merge(new_tokens, update, new_blocks, num_computed)


def _check_windows(sequence: Sequence, update: SequenceUpdate, num_full: int, limits: Limits) -> None:
    """Refuse a wrong statement of what the sequence has in groups with a window."""
    session = sequence.session
    session.require_groups(max(len(update.scratch), len(update.released)), "scratch")
    for name, groups in (("scratch", update.scratch), ("released", update.released)):
        for group, entries in enumerate(groups):
            if entries and not session.holder.spans[group]:
                raise bad_field(name, f"group {group} has no window: its sequences have no scratch and release nothing")
    for pool in session.window_pools:
        _check_window(sequence, pool.slot, update, num_full)


def _at(blocks: list[list[int]], slot: int) -> list[int]:
    return blocks[slot] if slot < len(blocks) else []


def apply(tree: PrefixTree, sequence: Sequence, merge: Merge) -> None:
    """Apply a checked update, and seal the blocks that are full and computed now."""
    session = sequence.session
    new_tokens, update, new_blocks, sequence.num_computed_tokens = merge
    if new_tokens:
        num_new_tokens = len(new_tokens) // TOKEN_BYTES
        sequence.tokens += new_tokens
        session.account.add_tokens(num_new_tokens)
        session.num_generated_tokens += num_new_tokens
    if update.encoder_computed:
        units.take_update(sequence)
    if update.bound:
        _bind(sequence, update.bound, new_blocks)
    if sequence.num_computed_tokens // session.block_size > sequence.num_sealed:
        _seal(tree, sequence)
    if sequence.windows:
        for pool in session.window_pools:
            _take_scratch(pool, sequence, _of_group(update.scratch, pool.slot))
            _name(tree, pool, sequence, _of_group(update.bound, pool.slot))
            _release(pool, sequence, _of_group(update.released, pool.slot))
        sequence.boundaries = tuple([one for one in sequence.boundaries if one > sequence.num_sealed])


def _bind(sequence: Sequence, bound: Tables, new_blocks: list[list[int]]) -> None:
    """Lengthen the tables by the blocks that checked entries add."""
    for group, blocks in enumerate(new_blocks):
        if blocks:
            pool, table = sequence.session.pools[group], sequence.tables[group]
            pool.bind(*blocks)
            table += blocks
            sequence.num_named[group] = len(table)  # named in order, up to the last one
        elif bound[group] and not (sequence.windows and sequence.windows[group] is not None):
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
    pools, tables = session.full_pools, sequence.tables
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


# -- groups with a window


def _take_scratch(pool: BlockPool, sequence: Sequence, stated: tuple[ReservedBlock, ...]) -> None:
    """Blocks of the reserve that the sequence has begun to use."""
    window = sequence.windows[pool.slot]
    assert window is not None
    for block, generation in stated:
        if pool.is_reserved(block, generation):
            pool.bind(block)
            window.scratch[block] = None


def _name(tree: PrefixTree, pool: BlockPool, sequence: Sequence, bound: tuple[TableEntry, ...]) -> None:
    """Give computed blocks their places: from now on they are hits for others, and never change."""
    window, session = sequence.windows[pool.slot], sequence.session
    assert window is not None
    end = -1
    for index, block, generation in bound:
        if pool.generation(block) != generation or index in window.entries:
            continue
        if pool.is_reserved(block, generation):
            pool.bind(block)
        elif block in window.scratch:
            del window.scratch[block]
        else:
            continue
        window.entries[index] = block
        if index == end and window.span > 1:
            window.ends.discard(end)  # the window goes on
        end = index + 1
        window.ends.add(end)
        pool.seal(block, sequence.nodes[index])
        if tree.journal is not None:
            tree.journal.sealed(
                sequence.key, session.holder, pool.slot, sequence.nodes, window.entries, index, index + 1
            )


def _release(pool: BlockPool, sequence: Sequence, released: tuple[TableEntry, ...]) -> None:
    """Take back what the sequence no longer uses. What it does not have is ignored, unless it is still reserved."""
    window = sequence.windows[pool.slot]
    assert window is not None
    for index, block, generation in released:
        if pool.generation(block) != generation:
            continue
        if window.entries.get(index) == block:
            _release_entry(pool, sequence, window, index)
            window.ends.discard(index + 1)
        elif block in window.scratch:
            del window.scratch[block]
            pool.release(block)
        else:
            pool.unreserve(block, generation)


def _end_window(pool: BlockPool, sequence: Sequence, window: WindowTable) -> None:
    """Release all that the sequence has, the window at its end as the last to be evicted."""
    pool.release(*window.scratch)
    window.ends.add(max(window.entries, default=-1) + 1)
    for index in sorted(window.entries, reverse=True):
        _release_entry(pool, sequence, window, index)


def _release_entry(pool: BlockPool, sequence: Sequence, window: WindowTable, index: int) -> None:
    block = window.entries.pop(index)
    if window.is_worth_keeping(index, sequence.nodes, sequence.kept):
        pool.release(block)
    else:
        pool.release_demoted(block)


def append(tree: PrefixTree, session: Session, item: AppendItem, generation: int, limits: Limits) -> Appended:
    """Merge an update of a live sequence and, if `want_blocks` asks for it, lengthen its table.

    Raises Refusal (having changed nothing): UNKNOWN_SEQUENCE, STALE_ROUND, STALE_ATTEMPT, GAP, TOKENS_DIFFER, STALE_GENERATION,
    BAD_FIELD, NEVER_FITS, NO_BLOCKS, TOO_MANY_BLOCKS, TOO_MANY_TOKENS.
    """
    sequence = find(session, item.update.key)
    merge = check(sequence, item.update, limits)
    if item.want_blocks > session.most_blocks_per_sequence:
        needed = f"a table of {item.want_blocks} blocks was wanted"
        raise session.never_fits(item.want_blocks, limits, needed=needed, cure="end the sequence", field="want_blocks")
    num_missing: list[int] = []
    if item.want_blocks:
        num_missing = [0] * len(sequence.tables)
        for slot in session.holder.full_slots:
            num_missing[slot] = max(0, item.want_blocks - len(sequence.tables[slot]))
        for group, blocks in enumerate(merge.new_blocks):
            num_missing[group] = max(0, num_missing[group] - len(blocks))
        session.require_available(num_missing)
    apply(tree, sequence, merge)
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

    Blocks named, in any field, that are still in the reserve with that generation go back to the free list; others are ignored.
    """
    key = update.key
    sequence = session.sequences.get((key.sequence_id, key.attempt))
    if sequence is not None and sequence.key.round <= key.round:
        if sequence.key.round == key.round:
            try:
                merge = check(sequence, update, limits)
            except Refusal:
                pass  # Free never fails: what is not consistent is not sealed.
            else:
                apply(tree, sequence, merge)
        end(tree, attempts, sequence)
    for stated in (update.bound, update.scratch, update.released):
        if stated:
            _unreserve(session, stated)


def _unreserve(session: Session, stated: tuple[tuple[TableEntry | ReservedBlock, ...], ...]) -> None:
    for pool, entries in zip(session.pools, stated, strict=False):
        for entry in entries:
            pool.unreserve(entry.block, entry.generation)


def end(tree: PrefixTree, attempts: Fencing, sequence: Sequence) -> None:
    """Release every table entry, the last block first: a prefix is evicted after its continuations."""
    session = sequence.session
    for pool in session.full_pools:
        pool.release(*reversed(sequence.tables[pool.slot]))
    for pool in session.window_pools:
        window = sequence.windows[pool.slot]
        assert window is not None
        _end_window(pool, sequence, window)
    if session.unit_pool is not None:
        units.release(sequence)
    leave(tree, attempts, sequence)


def leave(tree: PrefixTree, attempts: Fencing, sequence: Sequence) -> None:
    """Remove a sequence from the tree and the indexes. Its blocks stay as they are."""
    nodes, session = sequence.nodes, sequence.session
    for node in nodes[sequence.num_sealed :]:
        node.drop_leader(sequence)
    if session.unit_pool is not None:
        units.leave(sequence)
    deepest = nodes[-1] if nodes else sequence.root
    deepest.num_sequences -= 1
    tree.prune(deepest)
    session.account.add_tokens(-sequence.num_tokens)
    sequence.nodes = []
    sequence.tables = sequence.windows = ()
    del session.sequences[sequence.key.sequence_id, sequence.key.attempt]
    attempts.drop(sequence)
