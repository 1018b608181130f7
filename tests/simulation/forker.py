"""Forks that nobody has asked for: sequences that decode are forked between two steps, and forks of them again.

So every kind of model, fault and end meets forks. A fork goes on with the same text as its parent, or with another token; either
has one right continuation. The clients know nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpool.worker_service.cache.entry import BlockCopy
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from kvpool.worker_service.engine.request import GenerationParams, Rank, Request
from kvpool.worker_service.engine.scheduler import Scheduled
from tests import tracer

if TYPE_CHECKING:
    from tests.simulation.worker import WorkerProcess


_MOST_FORKS = 200
"""Of one process: forks that are preempted make room for others."""


class Forker:
    """In one process of a worker. Its `schedule` takes the place of the scheduler's."""

    def __init__(self, worker: WorkerProcess, rate: float) -> None:
        """`rate`: how often a sequence that could be forked is forked in a step."""
        self._worker = worker
        self._rate = rate
        self._draw = worker.kernel.random(f"forker {worker.name}")
        self._schedule = worker.engine.scheduler.schedule
        self._num_forks = 0
        self._is_fork: set[str] = set()
        self._going: list[tuple[Request, int]] = []
        """Requests of forks that have not ended, and how many tokens they began with."""
        self._copies: list[tuple[CacheSequence, tuple[BlockCopy, ...]]] = []

    def schedule(self, now: float) -> list[Scheduled]:
        """Fork some, between two steps, and schedule the next one."""
        self._check_texts()
        for request in list(self._worker.engine.scheduler._running):
            if self._draw.random() < self._rate and self._may_fork(request.sequence):
                self._fork(request, now)
        self._count_ends()
        return self._schedule(now)

    def take_copies(self) -> Sequence[BlockCopy]:
        """What the step that is launched now has to copy."""
        copies, self._copies = self._copies, []
        return [copy for child, of_child in copies if child.state is SequenceState.LIVE for copy in of_child]

    def _may_fork(self, sequence: CacheSequence) -> bool:
        scheduler = self._worker.engine.scheduler
        joining = [
            request
            for request in scheduler.waiting
            if request.sequence.maybe_granted or request.sequence.state is SequenceState.ALLOCATING
        ]
        return (
            sequence.state is SequenceState.LIVE
            and sequence.num_uncomputed_tokens == 1
            and sequence.num_computed_tokens > 0
            and not sequence.num_tokens_to_encode
            and sequence.max_tokens - len(sequence.tokens) >= 2
            and scheduler._num_places((*scheduler._running, *joining)) < scheduler.max_num_seqs
            and scheduler.num_waiting < 3
            and self._num_forks < _MOST_FORKS
            and not self._worker.engine.is_draining
        )

    def _fork(self, parent: Request, now: float) -> None:
        """A request of its own for the fork, without a reader."""
        engine, draw, counts = self._worker.engine, self._draw, self._worker.world.counts
        sequence = parent.sequence
        parts = draw.random() < 0.5
        self._num_forks += 1
        name = f"{sequence.id.sequence_id.partition('+')[0]}+{self._num_forks}"
        num_tokens = sequence.num_computed_tokens if parts else None
        forked = self._worker.cache.fork(sequence, name, num_tokens=num_tokens)
        counts["forks"] += forked is not None
        counts["forks without blocks"] += forked is None
        if forked is None:
            return
        child = forked.sequence
        if parts:
            child.tokens.append(1 + draw.randrange(90))
        counts["forks of forks"] += sequence.id.sequence_id in self._is_fork
        self._is_fork.add(name)
        self._copies.append((child, forked.copies))
        params = GenerationParams(
            name,
            child.id.attempt,
            list(child.tokens),
            max_tokens=child.max_tokens - len(child.tokens),
            sampling=parent.params.sampling,
            tenant_salt=parent.params.tenant_salt,
            encoder_token_ids=parent.params.encoder_token_ids,
        )
        request = Request(params, child, params.max_tokens, tracer.EOS, None)
        engine.scheduler._num_arrived += 1
        request.rank, request.payer = Rank(parent.rank.level, engine.scheduler._num_arrived), parent.payer
        request.times.arrived_at = now
        engine.scheduler._requests[child.id] = request
        engine.scheduler._running.add(request)
        request.on_granted()
        engine.stats.on_granted(request, now)
        self._going.append((request, len(child.tokens)))

    def _count_ends(self) -> None:
        """What the cache side has to wait for just now."""
        state, counts = self._worker.cache.state, self._worker.world.counts
        for sequence in state.ending:
            counts["parents that ended before their forks were known"] += state.is_parent(sequence)
            counts["forks that ended before they were known"] += sequence.parent is not None

    def _check_texts(self) -> None:
        """Of forks that have come to their end, whatever it was."""
        scheduler = self._worker.engine.scheduler
        going = self._going
        self._going = [(one, count) for one, count in going if scheduler.find(one.sequence.id) is one]
        for request, num_first in going:
            if scheduler.find(request.sequence.id) is request:
                continue
            self._worker.world.laws.count("one right text")
            tokens = request.sequence.tokens
            generated = tokens[num_first:]
            salt, encoder_tokens = request.sequence.root.tenant_salt, request.params.encoder_token_ids
            seed = request.params.sampling.seed
            right = tracer.expected_text(
                tokens[:num_first], len(generated), salt, seed=seed, encoder_tokens=encoder_tokens
            )
            if generated != right:
                what = f"the fork {request!r} has generated {generated}, not {right}"
                self._worker.world.fail("one right text", f"{self._worker.name}: {what}")
            self._worker.world.counts["texts of forks"] += bool(generated)
