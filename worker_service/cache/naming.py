"""Progress of a sequence: its complete blocks get a content, and what it has at a boundary is named, to be kept for others."""

from __future__ import annotations

from kvpool.protocol.tokens import pack_tokens

from . import boundaries
from .groups.scratch import Scratch
from .ledger import Content
from .reserve import SpareBlock
from .sequence import CacheSequence, SequenceState
from .state import CacheState


def complete(state: CacheState, sequence: CacheSequence, num_computed_tokens: int) -> None:
    """The KV of so many tokens is complete: give the blocks that are full now their content, and name what boundaries keep."""
    size, settings = state.settings.block_size, state.settings
    first, last = sequence.num_computed_tokens // size, num_computed_tokens // size
    for index in range(first, last):
        tokens = pack_tokens(sequence.tokens[index * size : (index + 1) * size])
        sequence.content = Content(sequence.content, sequence.root, tokens, len(state.ledgers))
        for ledger, table in zip(state.ledgers, sequence.group_tables, strict=True):
            if block := table.block_of(index):
                ledger.complete(block, sequence.content)
    if sequence.num_tokens_to_encode and num_computed_tokens > sequence.num_computed_tokens:
        for table in sequence.group_tables:
            if table.num_tokens_to_encode:
                table.encode(sequence.root, len(state.ledgers))
    if not settings.keeping_boundaries:
        sequence.num_computed_tokens = num_computed_tokens
        return
    reached = boundaries.reached(sequence, num_computed_tokens, settings)
    sequence.num_computed_tokens = num_computed_tokens
    for boundary in reached:
        name_boundary(state, sequence, boundary)
    sequence.boundaries = tuple([ahead for ahead in sequence.boundaries if ahead > num_computed_tokens])
    if num_computed_tokens == len(sequence.tokens):
        # Decoding begins, or goes on: release what only the prompt needed.
        for _, scratch in sequence.scratches():
            scratch.settle(max(0, sequence.most_blocks(size) - len(scratch.table)))


def add_boundary(state: CacheState, sequence: CacheSequence, boundary: int) -> None:
    """Add a boundary where a waiting prompt parts. Too late if the sequence is past it: what it had there may be written again."""
    if boundary < sequence.num_computed_tokens:
        return
    # Where it is just now, all is there: the next token needs it. If its blocks cannot be replaced yet, it is named after the
    # next step.
    is_there = boundary == sequence.num_computed_tokens and sequence.state is SequenceState.LIVE
    is_there = is_there and _has_its_copies(sequence)
    if is_there and name_boundary(state, sequence, boundary):
        state.is_urgent = True
    elif not is_there or not state.settings.grid_tokens:  # with a grid, the next step replaces what is there
        sequence.boundaries = tuple(sorted({*sequence.boundaries, boundary}))


def _has_its_copies(sequence: CacheSequence) -> bool:
    """Whether its blocks hold what they stand for: a fork may end before a step has made its copies, or the step may fail."""
    return not sequence.num_copies and not sequence.lacks_copies


def name_boundary(state: CacheState, sequence: CacheSequence, boundary: int) -> bool:
    """Name what ends at a boundary, in tokens, in every group, if it is there and the reserves can replace its blocks; returns
    whether that was so."""
    settings = state.settings
    num_blocks = boundary // settings.block_size
    parts: list[tuple[int, Scratch, int]] = []
    for group, scratch in sequence.scratches():
        is_there = scratch.has_window(num_blocks)
        assert is_there or scratch.is_useful_only, "the window's blocks were overwritten"
        count = boundaries.num_to_replace(sequence, scratch, boundary, settings)
        if not is_there or count > len(state.reserves[group]):
            state.num_windows_not_named += 1
            return False
        parts.append((group, scratch, count))
    for group, scratch, count in parts:
        replacements = [state.reserves[group].take() for _ in range(count)]
        for reserved in replacements:
            state.ledgers[group].use(reserved.block)
        _give_contents(state, sequence, group, scratch, num_blocks, replacements)
    state.num_windows_named += 1
    return True


def name_end(state: CacheState, sequence: CacheSequence) -> None:
    """The sequence ends: name what it has at its last boundary, from where a conversation goes on. It needs no block any more, so
    nothing is replaced."""
    settings = state.settings
    num_blocks = sequence.num_computed_tokens // settings.block_size
    num_blocks -= num_blocks % settings.sizes.grid_blocks
    parts = sequence.scratches()
    if _has_its_copies(sequence) and all(scratch.has_window(num_blocks) for _, scratch in parts):
        for group, scratch in parts:
            _give_contents(state, sequence, group, scratch, num_blocks, [])
        state.num_windows_named += bool(parts and num_blocks)


def _give_contents(
    state: CacheState,
    sequence: CacheSequence,
    group: int,
    scratch: Scratch,
    num_blocks: int,
    replacements: list[SpareBlock],
) -> None:
    """Name a window or snapshot of one group, and note what its blocks hold."""
    named = {entry.table_index: entry.block for entry in scratch.name(num_blocks, replacements)}
    content, index = sequence.content, sequence.num_computed_tokens // state.settings.block_size - 1
    while named and content is not None:
        if (block := named.pop(index, None)) is not None:
            state.ledgers[group].complete(block, content)
        content, index = content.parent, index - 1
