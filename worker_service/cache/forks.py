"""Forks: sequences that begin where another one is, without a call that anybody waits for.

A fork shares its parent's full computed blocks, and the encoder's output. What the parent goes on to write, its tail and what it
has in groups with a window or a state, is copied into blocks of the reserve by the next step. Of a window nothing is shared: only
named blocks can be, so the parent would have to name one at every fork, and each fork needs the ring that takes its place all the
same.

Forks are stated to the manager later. Until it knows of a fork, the fork's parent alone pins what it shares there, so the parent's
Free waits. A fork that ends before it was stated never existed for the manager: what it took out of the reserve goes back.
"""

from __future__ import annotations

from typing import NamedTuple

from . import events
from .entry import BlockCopy
from .sequence import CacheSequence, SequenceState
from .state import CacheState, Copying


class ForkedSequence(NamedTuple):
    """A fork, as the engine gets it."""

    sequence: CacheSequence
    """The fork: live, with the parent's tokens."""
    copies: tuple[BlockCopy, ...]
    """Copies that the step launched next must make, unless the fork ends before."""


def fork(state: CacheState, parent: CacheSequence, sequence_id: str, num_tokens: int | None) -> ForkedSequence | None:
    """See EngineCache.fork."""
    assert parent.state is SequenceState.LIVE
    assert not parent.in_step
    num_computed = parent.num_computed_tokens
    assert len(parent.tokens) - num_computed in (0, 1), "a fork begins where its parent decodes"
    assert not parent.num_tokens_to_encode, "the unit is written by the step that runs the encoder, for one sequence"
    num_tokens = len(parent.tokens) if num_tokens is None else num_tokens
    assert max(num_computed, 1) <= num_tokens <= len(parent.tokens)
    child = parent.alone(sequence_id, parent.tokens[:num_tokens])
    child.kept = ()
    if child.id in state.sequences:
        return None  # an earlier stream of that name has ended, and its blocks are not given back yet
    copies = _take_blocks(state, parent, child)
    if copies is None:
        parent.num_forks_to_come = max(parent.num_forks_to_come, 1)
        return None
    parent.num_forks_to_come = max(parent.num_forks_to_come - 1, 0)
    child.parent, child.progress_at = parent, parent.progress_at
    state.forks.append(child)
    state.sequences[child.id] = child
    if state.report_due_at is None:
        state.report_due_at = parent.progress_at + state.settings.report_seconds
    return ForkedSequence(child, _copy_later(state, parent, child, copies))


def _take_blocks(state: CacheState, parent: CacheSequence, child: CacheSequence) -> list[BlockCopy] | None:
    """Give a new fork its tables; returns what is to be copied. None, without a change: a reserve has too few."""
    size, num_computed = state.settings.block_size, parent.num_computed_tokens
    num_to_come = max(0, child.most_blocks(size) - -(-num_computed // size))
    counts = [table.num_for_fork(num_computed, num_to_come) for table in parent.group_tables]
    if any(count > len(reserve) for count, reserve in zip(counts, state.reserves, strict=True)):
        return None
    tables, copies = [], []
    for group, (table, ledger, reserve) in enumerate(
        zip(parent.group_tables, state.ledgers, state.reserves, strict=True)
    ):
        spare = [reserve.take() for _ in range(counts[group])]
        forked = table.fork(num_computed, spare)
        ledger.use(*forked.shared, *(reserved.block for reserved in spare))
        tables.append(forked.table)
        copies += [BlockCopy(group, source, target) for source, target in forked.copies]
    child.take(tables)
    child.state = SequenceState.LIVE
    child.content, child.num_computed_tokens = parent.content, num_computed
    child.acked_tokens = child.acked_computed_tokens = num_computed // size * size
    return copies


# -- copies


def _copy_later(
    state: CacheState, parent: CacheSequence, child: CacheSequence, copies: list[BlockCopy]
) -> tuple[BlockCopy, ...]:
    """Note copies that the next step makes. What the parent itself has yet to get is copied from where it gets it, so that no copy
    depends on another one."""
    source = parent
    for waiting in state.copies_due:
        if waiting.fork is parent:
            source = waiting.source
            origins = {(copy.group, copy.target): copy.source for copy in waiting.copies}
            copies = [copy._replace(source=origins.get((copy.group, copy.source), copy.source)) for copy in copies]
    if copies:
        state.copies_due.append(Copying(source, child, tuple(copies)))
        source.num_copies += 1
        child.num_copies += 1
    return tuple(copies)


def begin_copies(state: CacheState) -> None:
    """A step starts, and makes the copies of all forks since the last one."""
    state.copies_made += state.copies_due
    state.copies_due = []


def end_copies(state: CacheState, *, are_made: bool = True) -> None:
    """The step has ended; `are_made`: it has not failed."""
    for copying in state.copies_made:
        copying.fork.lacks_copies = not are_made
        _end(copying)
    state.copies_made = []


def drop_copies(state: CacheState, child: CacheSequence) -> None:
    """A fork ends: the next step need not make its copies."""
    for copying in state.copies_due:
        if copying.fork is child:
            child.lacks_copies = True
            _end(copying)
    state.copies_due = [copying for copying in state.copies_due if copying.fork is not child]


def blocks_to_copy(state: CacheState, group: int) -> set[int]:
    """Blocks of a group from or to which a step has yet to copy."""
    copies = (copy for copying in (*state.copies_due, *state.copies_made) for copy in copying.copies)
    return {block for copy in copies if copy.group == group for block in (copy.source, copy.target)}


def _end(copying: Copying) -> None:
    copying.source.num_copies -= 1
    copying.fork.num_copies -= 1


# -- the end of a fork, or of its parent


def is_to_be_stated(state: CacheState, child: CacheSequence) -> bool:
    """Whether the manager must hear of a fork that it does not know: it lives, others are forks of it, or it has completed blocks
    that can be hits."""
    if child.is_superseded:
        return False
    size = state.settings.block_size
    has_content = child.num_computed_tokens // size * size > child.acked_computed_tokens
    return (
        child.state is not SequenceState.ENDING
        or state.is_parent(child)
        or (has_content and not state.forks_found_no_room)
    )


def may_free(state: CacheState, sequence: CacheSequence) -> bool:
    """Whether the blocks of an ending sequence can be given back now."""
    is_unknown_fork = sequence.parent is not None and is_to_be_stated(state, sequence)
    return not (sequence.is_busy or is_unknown_fork or state.is_parent(sequence))


def settle(state: CacheState) -> None:
    """End forks that need not be stated, and were not: the blocks that they took are in the reserve again."""
    # A fork of a fork comes after it, and may be what it waits for.
    for child in [child for child in reversed(state.forks) if child.state is SequenceState.ENDING]:
        if not child.maybe_granted and may_free(state, child):
            _give_back(state, child)
            state.ending.remove(child)
            state.end(child)


def _give_back(state: CacheState, child: CacheSequence) -> None:
    """Put a fork's own blocks back into the reserve, as they were when they were granted."""
    for table, reserve, ledger in zip(child.group_tables, state.reserves, state.ledgers, strict=True):
        for reserved in table.from_reserve:
            ledger.empty(reserved.block)
            reserve.add(*reserved)


# -- the link


def to_state(state: CacheState) -> list[CacheSequence]:
    """Forks that can be stated to the manager, in order: it knows their parents, or hears of them in the same call, and all that
    they share is computed for it."""
    ready: list[CacheSequence] = []
    for child in state.forks:
        parent = child.parent
        assert parent is not None
        is_known = parent.parent is None and not _is_behind(parent, child)
        if (is_known or parent in ready) and is_to_be_stated(state, child):
            ready.append(child)
    return ready


def behind(state: CacheState) -> list[CacheSequence]:
    """Parents of which the manager must know more before their forks can be stated."""
    parents = [
        child.parent
        for child in state.forks
        if child.parent is not None
        and child.parent.parent is None
        and _is_behind(child.parent, child)
        and is_to_be_stated(state, child)
    ]
    return list(dict.fromkeys(parents))


def _is_behind(parent: CacheSequence, child: CacheSequence) -> bool:
    """Whether the manager does not know that all that a fork shares is computed: its blocks, and the encoder's output."""
    return parent.has_encoder_news or parent.acked_computed_tokens < child.acked_computed_tokens


def is_pressing(state: CacheState) -> bool:
    """Whether blocks are not given back as long as the manager does not know of a fork."""
    return bool(state.forks) and any(
        not sequence.is_busy and not may_free(state, sequence) for sequence in state.ending
    )


def acknowledge(state: CacheState, child: CacheSequence) -> None:
    """The manager knows of a fork."""
    child.parent = None
    state.forks.remove(child)
    state.forks_found_no_room = False


def postpone(state: CacheState, now: float) -> None:
    """The manager had no room for a fork, or for what its parent has computed."""
    state.forks_retry_at = now + state.settings.no_blocks_retry_seconds
    state.forks_found_no_room = True


def supersede(state: CacheState, sequence: CacheSequence) -> None:
    """A larger attempt of a sequence runs on another worker: the forks that the manager does not know must end with it, and so must
    the sequence if it is one of them."""
    gone = [sequence]
    for child in state.forks:
        if child is sequence or child.parent in gone:
            gone.append(child)
            if not child.is_superseded and child.state is SequenceState.LIVE:
                state.events.append(events.Stopped(child))
            child.is_superseded = True
    sequence.is_superseded = True
