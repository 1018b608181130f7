"""Prefixes in flight: sequences that wait for another one to compute their prefix, and hold nothing meanwhile."""

from __future__ import annotations

from kvpool.v1 import cache_pb2

from .sequence import CacheSequence, SequenceId, SequenceState
from .state import CacheState


def park(state: CacheState, sequence: CacheSequence, wait: cache_pb2.Wait, now: float) -> None:
    """Let the sequence wait until the manager acknowledges that the leader has reached the position.

    It does not wait for a leader of a worse level, which makes no progress while better levels run: it is allocated again with
    `no_wait`.
    """
    leader_id = SequenceId(wait.leader.sequence_id, wait.leader.attempt)
    leader = state.sequences.get(leader_id)
    if leader is not None and leader.level > sequence.level:
        sequence.state, sequence.no_wait = SequenceState.WAITING, True
        return
    sequence.state = SequenceState.PARKED
    sequence.parked_on = leader_id
    sequence.parked_position = wait.position
    sequence.parked_at = now
    state.parked.append(sequence)
    if leader is not None and _has_computed(leader, wait.position):
        state.is_urgent = True  # computed, but not reported


def _has_computed(leader: CacheSequence, position: int) -> bool:
    """Whether the leader has computed so far; position 0 means the KV of the encoder's input."""
    return leader.num_computed_tokens >= position if position else leader.encoder_computed


def _is_reported(leader: CacheSequence, position: int) -> bool:
    """Whether the manager has acknowledged that the leader has computed so far."""
    if position:
        return leader.acked_computed_tokens >= position
    return leader.encoder_computed and not leader.has_encoder_news


def is_waited_for(state: CacheState, leader: CacheSequence) -> bool:
    """Whether a parked sequence waits for a position that the leader has computed."""
    return any(
        sequence.parked_on == leader.id and _has_computed(leader, sequence.parked_position) for sequence in state.parked
    )


def wake(state: CacheState, now: float) -> None:
    """Unpark sequences whose prefix is reported, whose leader has ended, or whose leader makes no progress; the last compute the
    prefix themselves.

    A leader in a step that computes its prefix makes progress, however long the step takes: until it ends, the others could not
    be computed either.
    """
    still: list[CacheSequence] = []
    for sequence in state.parked:
        assert sequence.parked_on is not None
        leader = state.sequences.get(sequence.parked_on)
        if leader is not None and not _is_reported(leader, sequence.parked_position):
            is_computing = leader.in_step and not _has_computed(leader, sequence.parked_position)
            if is_computing or now < max(sequence.parked_at, leader.progress_at) + state.settings.prefix_wait_seconds:
                still.append(sequence)
                continue
            sequence.no_wait = True
        sequence.state = SequenceState.WAITING
    state.parked = still
