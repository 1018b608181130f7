"""What displays show of workers, sequences and the cluster, as immutable values: two equal ones need not be sent twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from .manager import CacheManager
from .messages import BlockCounts, Registration, SequenceKey, WorkerLoad
from .session import Session


class WorkerFacts(NamedTuple):
    """A session, without its blocks and sequences, and without the lease, which changes all the time."""

    session: int
    registration: Registration
    counts: tuple[BlockCounts, ...]
    """The counts of each group's pool, by group."""
    load: WorkerLoad
    num_sequences: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_evicted_blocks: int
    num_calls: int
    num_generated_tokens: int
    draining: bool
    recovering: bool
    max_model_len: int
    """Tokens of the longest text that can be served; the worker may have registered more."""
    longest_input: int
    """Tokens of the longest encoder's input that can be served; 0: it has no encoder."""
    facts_digest: bytes


class SequenceFacts(NamedTuple):
    """A live sequence."""

    key: SequenceKey
    num_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_blocks: int
    fenced: bool


class BudgetFacts(NamedTuple):
    """The budget of all workers; see `Budget`."""

    num_blocks: int
    max_blocks: int
    num_slots: int
    num_sequence_tokens: int
    max_tokens: int


class ClusterFacts(NamedTuple):
    """All workers together."""

    num_prefix_nodes: int
    budget: BudgetFacts
    num_audits: int = 0
    num_violations: int = 0
    """Violations that the last audit found."""


def worker_facts(session: Session) -> WorkerFacts:
    """Return the facts about a worker as they are now."""
    return WorkerFacts(
        session.number,
        session.registration,
        session.counts(),
        session.load,
        len(session.sequences),
        session.num_prompt_tokens,
        session.num_cached_tokens,
        sum(pool.num_evicted for pool in session.pools),
        session.num_calls,
        session.num_generated_tokens,
        session.draining,
        session.recovering,
        session.max_model_len,
        session.longest_input,
        session.facts_digest,
    )


def sequence_facts(session: Session, most: int) -> Iterator[SequenceFacts]:
    """Yield the facts about the first `most` live sequences of a session, oldest grant first, as they are now."""
    for sequence in islice(session.sequences.values(), most):
        yield SequenceFacts(
            sequence.key,
            sequence.num_tokens,
            sequence.num_cached_tokens,
            sequence.num_computed_tokens,
            sequence.num_blocks,
            sequence.fenced,
        )


def cluster_facts(manager: CacheManager, num_audits: int = 0, num_violations: int = 0) -> ClusterFacts:
    """Return the facts about all workers as they are now. The caller counts audits and violations."""
    budget = manager.budget
    used = BudgetFacts(
        budget.num_blocks, budget.max_blocks, budget.num_slots, budget.num_sequence_tokens, budget.max_tokens
    )
    return ClusterFacts(manager.num_prefix_nodes, used, num_audits, num_violations)
