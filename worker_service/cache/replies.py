"""Applies the manager's messages: downlink entries and replies to calls. Raises DisagreementError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvpool.protocol.status import reason_of
from kvpool.protocol.tokens import TOKEN_BYTES
from kvpool.v1 import cache_pb2, common_pb2

from . import events, forks, naming, parking
from .entry import Entry
from .ledger import Content, DisagreementError
from .link_state import LinkState, MutatingCall, Stated
from .reserve import SpareBlock
from .ring import Ring
from .running_state import RunningState
from .scratch import Scratch
from .sequence import CacheSequence, SequenceId, SequenceState
from .state import CacheState

_TAKING_BOUNDARIES = frozenset({SequenceState.ALLOCATING, SequenceState.LIVE})
"""States in which a boundary is taken: its entry may come with the reply that grants the sequence, before the grant."""

_SUPERSEDED = frozenset({"STALE_ATTEMPT", "SEQUENCE_ELSEWHERE"})

_NO_ROOM = frozenset({"NO_BLOCKS", "NOT_TRIED", "TOO_MANY_SEQUENCES", "TOO_MANY_BLOCKS", "TOO_MANY_TOKENS"})

Response = (
    cache_pb2.AllocateResponse
    | cache_pb2.AppendResponse
    | cache_pb2.ForkResponse
    | cache_pb2.FreeResponse
    | cache_pb2.ReportResponse
)


def take_reply(state: CacheState, link: LinkState, call: MutatingCall, response: Response, now: float) -> None:
    """Apply the reply to a call, which was executed."""
    if any(call.returned):
        for reserve, returned in zip(state.reserves, call.returned, strict=True):
            reserve.returned(returned)
        state.ask_again_at = now
    # The downlink first: it has grants to the reserve that precede the tables of this reply.
    take_entries(state, link, response.downlink)
    if isinstance(response, cache_pb2.ReportResponse):
        if link.report is not None and link.report.next_part():
            link.report = None
        return
    if isinstance(response, cache_pb2.AllocateResponse):
        for stated, allocated in zip(call.stated, response.results, strict=True):
            _on_allocated(state, stated, allocated, now)
    elif isinstance(response, cache_pb2.AppendResponse):
        for stated, appended in zip(call.stated, response.results, strict=True):
            _on_appended(state, stated, appended, now)
    elif isinstance(response, cache_pb2.ForkResponse):
        for stated, forked in zip(call.stated, response.results, strict=True):
            _on_forked(state, stated, forked, now)
    else:
        for stated in call.stated:
            state.ending.remove(stated.sequence)
            state.end(stated.sequence)
        state.ask_again_at = now
    forks.settle(state)
    if len(response.downlink.counts) == len(state.ledgers):
        state.num_free = [counts.free for counts in response.downlink.counts]
        state.pool_is_empty = [
            not counts.free + counts.cached and len(reserve) < target
            for counts, reserve, target in zip(
                response.downlink.counts, state.reserves, state.spare_targets(), strict=True
            )
        ]


def take_entries(state: CacheState, link: LinkState, downlink: cache_pb2.Downlink) -> None:
    """Apply new entries, in order."""
    for entry in link.new_entries(downlink):
        if entry.HasField("grant"):
            group = _group(state, entry.grant)
            for block, generation in zip(*_pairs(entry.grant.block_ids, entry.grant.generations), strict=True):
                state.ledgers[group].accept_grant(block, generation)
                state.reserves[group].add(block, generation)
        elif entry.HasField("stop"):
            sequence = state.sequences.get(SequenceId(entry.stop.sequence_id, entry.stop.attempt))
            if sequence is not None and sequence.state is not SequenceState.ENDING:
                state.events.append(events.Stopped(sequence))
        elif entry.HasField("boundary"):
            key = entry.boundary.key
            sequence = state.sequences.get(SequenceId(key.sequence_id, key.attempt))
            if sequence is not None and sequence.round == key.round and sequence.state in _TAKING_BOUNDARIES:
                naming.add_boundary(state, sequence, entry.boundary.num_tokens)
        elif entry.HasField("drain"):
            grace = entry.drain.grace_ms / 1000 if entry.drain.HasField("grace_ms") else None
            state.events.append(events.DrainAsked(grace))


def _group(state: CacheState, run: common_pb2.BlockRun) -> int:
    """The group of a run, after a check that there is one."""
    if run.group >= len(state.ledgers):
        raise DisagreementError(
            f"blocks of group {run.group} were granted; the groups are 0 to {len(state.ledgers) - 1}"
        )
    return run.group


def _pairs(blocks: Sequence[int], generations: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Both, after a check that they have the same length."""
    if len(blocks) != len(generations):
        raise DisagreementError(f"{len(blocks)} blocks were granted with {len(generations)} generations")
    return blocks, generations


def _on_allocated(state: CacheState, stated: Stated, result: cache_pb2.AllocateResult, now: float) -> None:
    sequence = stated.sequence
    is_withdrawn = sequence.state is SequenceState.ENDING
    if result.status.code == 0 and result.HasField("granted"):
        _take_table(state, sequence, stated.prompt, result.granted)
        if not is_withdrawn:
            sequence.state = SequenceState.LIVE
            state.events.append(events.Granted(sequence))
        return
    reason = reason_of(result.status)
    if result.status.code and reason not in _NO_ROOM:
        # An earlier Allocate of this round may have been executed and its reply lost: only Free is certain to release its blocks.
        if not is_withdrawn:
            sequence.state = SequenceState.ENDING
            state.ending.append(sequence)
            state.events.append(events.Refused(sequence, result.status))
        return
    # A wait, or no room: the manager does not hold it, else the reply would have its table.
    sequence.maybe_granted = False
    state.sequences.pop(sequence.id, None)
    if is_withdrawn:
        state.ending.remove(sequence)
        state.end(sequence)
    elif result.status.code == 0:
        parking.park(state, sequence, result.wait, now)
    else:
        sequence.state = SequenceState.WAITING
        state.ask_again_at = now + state.settings.no_blocks_retry_seconds


def _take_table(state: CacheState, sequence: CacheSequence, prompt: bytes, granted: cache_pb2.Granted) -> None:
    """Enter the tables granted for a prompt: their leading blocks as hits, the others as grants."""
    groups = [table.group for table in granted.tables]
    if groups != list(range(len(state.ledgers))) or granted.num_cached_tokens * TOKEN_BYTES >= len(prompt):
        raise DisagreementError(
            f"{sequence!r} was granted tables of the groups {groups} with {granted.num_cached_tokens} of its "
            f"{len(prompt) // TOKEN_BYTES} tokens cached; one table for each of {len(state.ledgers)} groups, and a token to "
            "compute, were expected"
        )
    tables = [_pairs(table.block_ids[:], table.generations[:]) for table in granted.tables]
    settings = state.settings
    full = state.full_groups
    if len({len(tables[group][0]) for group in full}) > 1:
        raise DisagreementError(
            f"{sequence!r} was granted tables of different length: {[len(tables[group][0]) for group in full]}"
        )
    num_hits = granted.num_cached_tokens // settings.block_size
    cached = prompt[: granted.num_cached_tokens * TOKEN_BYTES]
    last: Content | None = None
    for group in full:
        blocks, generations = tables[group]
        last = state.ledgers[group].accept_hits(blocks[:num_hits], generations[:num_hits], cached, sequence.root)
    windows = _windows(state, sequence, granted) if state.scratch_groups else {}
    for group, window in windows.items():
        last = state.ledgers[group].accept_window(window.entries, last, cached, sequence.root)
    _check_unit(state, sequence, granted)
    sequence.content = last
    sequence.tables = tuple(list(blocks[:num_hits]) for blocks, _ in tables)
    sequence.generations = tuple(list(generations[:num_hits]) for _, generations in tables)
    sequence.uses_blocks = True
    for group in full:
        state.ledgers[group].use(*sequence.tables[group])
    _take_unit(state, sequence, granted)
    for group, window in windows.items():
        state.ledgers[group].use(*(entry.block for entry in window.entries))
    for group in full:
        ledger, (blocks, generations) = state.ledgers[group], tables[group]
        for block, generation in zip(blocks[num_hits:], generations[num_hits:], strict=True):
            ledger.accept_grant(block, generation)
            ledger.use(block)
            sequence.tables[group].append(block)
            sequence.generations[group].append(generation)
        sequence.num_entries = len(sequence.tables[group])
    if windows:
        _make_scratch(state, sequence, windows)
        sequence.boundaries = tuple(sorted({*sequence.boundaries, *granted.boundaries}))
    sequence.num_cached_tokens = sequence.num_computed_tokens = granted.num_cached_tokens
    sequence.acked_tokens = len(sequence.tokens)
    sequence.acked_entries = sequence.num_entries
    sequence.acked_computed_tokens = granted.num_cached_tokens


def _check_unit(state: CacheState, sequence: CacheSequence, granted: cache_pb2.Granted) -> None:
    """Check what was granted in the group with cross attention: a whole unit of the sequence's root, if it is cached."""
    ledger = state.unit_ledger
    if ledger is None:
        if granted.encoder_cached:
            raise DisagreementError(f"{sequence!r} was granted the KV of an encoder's input, and has none")
        return
    run = granted.tables[ledger.group]
    num_needed = state.settings.num_unit_blocks(sequence.num_encoder_tokens)
    if len(run.block_ids) != num_needed:
        raise DisagreementError(
            f"{sequence!r} was granted {len(run.block_ids)} blocks of group {ledger.group} for an encoder's input of "
            f"{sequence.num_encoder_tokens} tokens, which needs {num_needed}"
        )
    if granted.encoder_cached:
        ledger.accept_unit(run.block_ids, run.generations, sequence.root, sequence.num_encoder_tokens)


def _take_unit(state: CacheState, sequence: CacheSequence, granted: cache_pb2.Granted) -> None:
    """Enter the unit: as a hit that was checked, or as grants."""
    ledger = state.unit_ledger
    if ledger is None:
        return
    run = granted.tables[ledger.group]
    sequence.cross_group = ledger.group
    sequence.encoder_computed = sequence.encoder_cached = sequence.encoder_acked = granted.encoder_cached
    table, generations = sequence.tables[ledger.group], sequence.generations[ledger.group]
    table.clear()
    generations.clear()
    for block, generation in zip(run.block_ids, run.generations, strict=True):
        if not granted.encoder_cached:
            ledger.accept_grant(block, generation)
        ledger.use(block)
        table.append(block)
        generations.append(generation)


class _Window(NamedTuple):
    """What was granted in a group with a window or a state."""

    entries: list[Entry]
    """Entries of the window or snapshot that is hit, in order."""
    scratch: list[SpareBlock]


def _windows(state: CacheState, sequence: CacheSequence, granted: cache_pb2.Granted) -> dict[int, _Window]:
    """What was granted in each group with a window or a state, after a check that it is all that is needed before the first token
    that is not cached."""
    settings = state.settings
    num_hits = granted.num_cached_tokens // settings.block_size
    scratch = {run.group: _pairs(run.block_ids, run.generations) for run in granted.scratch}
    windows: dict[int, _Window] = {}
    for group in state.scratch_groups:
        run = granted.tables[group]
        entries = [
            Entry(run.start_index + offset, block, generation)
            for offset, (block, generation) in enumerate(zip(run.block_ids, run.generations, strict=True))
        ]
        expected = list(range(max(0, num_hits - settings.span(group)), num_hits))
        if [entry.table_index for entry in entries] != expected:
            raise DisagreementError(
                f"{sequence!r} was granted {len(entries)} blocks of group {group} from index {run.start_index} on as the window "
                f"before block {num_hits}, which has the indexes {expected}"
            )
        blocks = list(map(SpareBlock, *scratch.get(group, ((), ()))))
        num_needed = min(settings.scratch_blocks(group), sequence.most_blocks(settings.block_size) - num_hits)
        if len(blocks) < num_needed:
            raise DisagreementError(
                f"{sequence!r} was granted {len(blocks)} scratch blocks of group {group}, {num_needed} are needed"
            )
        windows[group] = _Window(entries, blocks)
    return windows


def _make_scratch(state: CacheState, sequence: CacheSequence, windows: dict[int, _Window]) -> None:
    """Make the sequence's rings and state out of what was granted and checked."""
    parts: list[Scratch | None] = [None] * len(state.ledgers)
    for group, (entries, granted) in windows.items():
        ledger = state.ledgers[group]
        for block, generation in granted:
            ledger.accept_grant(block, generation)
            ledger.use(block)
        parts[group] = _new_scratch(state, group, entries, granted)
    sequence.scratch = tuple(parts)
    sequence.tables = tuple(
        table if scratch is None else scratch.table for table, scratch in zip(sequence.tables, parts, strict=True)
    )
    sequence.generations = tuple(
        table if scratch is None else [] for table, scratch in zip(sequence.generations, parts, strict=True)
    )


def _new_scratch(state: CacheState, group: int, hits: list[Entry], granted: list[SpareBlock]) -> Scratch:
    settings = state.settings
    if settings.is_state(group):
        return RunningState(settings.grid_blocks, settings.block_size, hits, granted)
    size, grid = settings.scratch_blocks(group), settings.grid_blocks
    return Ring(settings.span(group), settings.block_size, hits, granted, size=size, grid_blocks=grid)


def _on_appended(state: CacheState, stated: Stated, result: cache_pb2.AppendResult, now: float) -> None:
    sequence = stated.sequence
    if result.status.code:
        reason = reason_of(result.status)
        if reason == "STALE_ATTEMPT":
            forks.supersede(state, sequence)
        if sequence.state is not SequenceState.LIVE:
            # The engine is done with it; Free releases its blocks, and waits for its forks.
            if state.is_parent(sequence):
                forks.postpone(state, now)
            return
        if reason == "TOO_MANY_TOKENS":
            # Nothing was applied. The computed blocks stay here and are stated again.
            state.report_due_at = now + state.settings.no_blocks_retry_seconds
            return
        if reason != "STALE_ATTEMPT":
            raise DisagreementError(f"an Append of {sequence!r} was refused with {reason}: {result.status.message}")
        state.events.append(events.Stopped(sequence))
        return
    _acknowledge(stated, now)


def _on_forked(state: CacheState, stated: Stated, result: cache_pb2.ForkResult, now: float) -> None:
    child = stated.sequence
    reason = reason_of(result.status) if result.status.code else ""
    if not result.status.code:
        forks.acknowledge(state, child)
        _acknowledge(stated, now)
    elif reason in _NO_ROOM:
        forks.postpone(state, now)
    elif reason in _SUPERSEDED:
        forks.supersede(state, child)
    elif child.parent is not None and child.parent.parent is not None:
        return  # its parent was refused in the same call, and both are stated again if they can be
    elif not child.is_superseded:
        raise DisagreementError(f"a Fork of {child!r} was refused with {reason}: {result.status.message}")


def _acknowledge(stated: Stated, now: float) -> None:
    """Note that the manager knows what was stated of a sequence."""
    sequence = stated.sequence
    if stated.num_computed_tokens > sequence.acked_computed_tokens:
        sequence.progress_at = now
    sequence.acked_tokens = max(sequence.acked_tokens, stated.num_tokens)
    sequence.acked_entries = max(sequence.acked_entries, stated.num_entries)
    sequence.acked_computed_tokens = max(sequence.acked_computed_tokens, stated.num_computed_tokens)
    sequence.encoder_acked = sequence.encoder_acked or stated.encoder_computed
    for scratch, statement in zip(sequence.scratch, stated.scratch, strict=False):
        if scratch is not None and statement is not None:
            scratch.acknowledge(statement)
