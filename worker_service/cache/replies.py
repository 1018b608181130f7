"""Applies the manager's messages: downlink entries and replies to calls. Raises DisagreementError."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvpool.protocol.status import reason_of
from kvpool.protocol.tokens import TOKEN_BYTES
from kvpool.v1 import cache_pb2, common_pb2

from . import events, forks, naming, parking
from .ledger import Content, DisagreementError
from .link_state import LinkState, MutatingCall, Stated
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
        if state.waits_for_blocks:
            state.ask_again_at = now
    # The downlink first: it has grants to the reserve that precede the tables of this reply.
    take_entries(state, link, response.downlink)
    if isinstance(response, cache_pb2.ReportResponse):
        if link.report is not None and link.report.next_part():
            link.report = None
        return
    if not isinstance(response, cache_pb2.FreeResponse):
        for stated, result in zip(call.stated, response.results, strict=True):
            _ON_RESULT[type(result)](state, stated, result, now)
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
            state.events.append(events.TableGranted(sequence))
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
        if reason != "NOT_TRIED":
            state.waits_for_blocks = reason != "TOO_MANY_SEQUENCES"


def _take_table(state: CacheState, sequence: CacheSequence, prompt: bytes, granted: cache_pb2.Granted) -> None:
    """Enter the tables granted for a prompt: what is cached as hits, the other blocks as grants."""
    settings, num_groups = state.settings, len(state.ledgers)
    groups = [table.group for table in granted.tables]
    if groups != list(range(num_groups)) or granted.num_cached_tokens * TOKEN_BYTES >= len(prompt):
        raise DisagreementError(
            f"{sequence!r} was granted tables of the groups {groups} with {granted.num_cached_tokens} of its "
            f"{len(prompt) // TOKEN_BYTES} tokens cached; one table for each of {num_groups} groups, and a token to compute, were "
            "expected"
        )
    for run in (*granted.tables, *granted.scratch):
        _pairs(run.block_ids, run.generations)
    if len(settings.growing) > 1:
        lengths = [len(granted.tables[group].block_ids) for group in settings.growing]
        if len(set(lengths)) > 1:
            raise DisagreementError(f"{sequence!r} was granted tables of different length: {lengths}")
    if granted.encoder_cached and not settings.encoder_capacity:
        raise DisagreementError(f"{sequence!r} was granted the KV of an encoder's input, and has none")
    parts = [group.read(granted, index, sequence, settings.sizes) for index, group in enumerate(settings.groups)]
    last: Content | None = None
    cached = prompt[: granted.num_cached_tokens * TOKEN_BYTES]
    for index in settings.by_hits:
        last = settings.groups[index].accept(state.ledgers[index], parts[index].hits, last, cached, sequence)
    for ledger, (hits, _) in zip(state.ledgers, parts, strict=True):
        ledger.use(*hits.blocks)
    try:
        for ledger, (_, empty) in zip(state.ledgers, parts, strict=True):
            for block, generation in zip(empty.blocks, empty.generations, strict=True):
                ledger.accept_grant(block, generation)
    except DisagreementError:
        for ledger, (hits, _) in zip(state.ledgers, parts, strict=True):
            for block in hits.blocks:
                ledger.drop(block)
        raise
    tables = []
    for group, ledger, part in zip(settings.groups, state.ledgers, parts, strict=True):
        ledger.use(*part.empty.blocks)
        tables.append(group.take(ledger, part, sequence, settings.sizes))
    sequence.take(tables)
    sequence.content = last
    if settings.keeping_boundaries:
        sequence.boundaries = tuple(sorted({*sequence.boundaries, *granted.boundaries}))
    sequence.num_cached_tokens = sequence.num_computed_tokens = granted.num_cached_tokens
    sequence.acked_tokens = len(sequence.tokens)
    sequence.acked_computed_tokens = granted.num_cached_tokens


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
    sequence.acked_computed_tokens = max(sequence.acked_computed_tokens, stated.num_computed_tokens)
    for table, statement in zip(sequence.group_tables, stated.statements, strict=False):
        table.acknowledge(statement)


_ON_RESULT: dict[type, Callable[[CacheState, Stated, Any, float], None]] = {
    cache_pb2.AllocateResult: _on_allocated,
    cache_pb2.AppendResult: _on_appended,
    cache_pb2.ForkResult: _on_forked,
}
