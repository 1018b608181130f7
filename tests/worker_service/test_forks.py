"""Forks on a worker's cache side, over the manager's core: what is shared, what is copied, and who waits for whom."""

from __future__ import annotations

import pytest

from kvpool.worker_service.cache.entry import BlockCopy
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from tests.worker_service.windowed import Worker


def _decoding(worker: Worker, name: str, num_tokens: int, num_new: int = 20) -> CacheSequence:
    """A sequence that has computed so many tokens of its prompt, and has one more."""
    sequence = worker.begin(name, range(1, 1 + num_tokens), num_new)
    sequence.num_forks_to_come = 4
    worker.call()
    while sequence.num_computed_tokens < num_tokens:
        worker.step(sequence)
    return sequence


def test_a_fork_shares_full_blocks_and_gets_a_copy_of_the_tail() -> None:
    worker = Worker((32,), (0,), block_size=4)
    parent = _decoding(worker, "p", 10)
    forked = worker.cache.fork(parent, "c")
    assert forked is not None
    child = forked.sequence
    assert child.state is SequenceState.LIVE
    assert (child.tokens, child.num_computed_tokens) == (parent.tokens, 10)
    assert child.tables[0][:2] == parent.tables[0][:2]
    assert forked.copies == (BlockCopy(0, parent.tables[0][2], child.tables[0][2]),)
    assert child.tables[0][2] not in parent.tables[0]
