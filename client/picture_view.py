"""The present state of a cluster, put together from the pictures of Client.watch."""

from __future__ import annotations

import sys
from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.v1 import cache_pb2, common_pb2

from .errors import ProtocolError


@dataclass(slots=True)
class PoolView:
    """The blocks of one group. Lists are indexed by block id; a block past their end was never granted and is free."""

    states: bytearray = field(default_factory=bytearray)
    """BlockState of each block."""
    ref_counts: array[int] = field(default_factory=lambda: array("H"))
    """Number of tables that each block is in, at most 65,535."""
    last_used: array[int] = field(default_factory=lambda: array("I"))
    """Number of the picture in which each block was last granted or hit, modulo 2^32; 0: not since watching began."""
    salt_numbers: array[int] = field(default_factory=lambda: array("H"))
    """Number of the tenant's salt of each block; 0: it has none, or the block holds nothing."""

    def grow(self, num_blocks: int) -> None:
        """Extend the lists to at least `num_blocks`; new blocks are free."""
        count = num_blocks - len(self.states)
        if count > 0:
            self.states += bytes([cache_pb2.BLOCK_STATE_FREE]) * count
            self.ref_counts.frombytes(bytes(2 * count))
            self.last_used.frombytes(bytes(4 * count))
            self.salt_numbers.frombytes(bytes(2 * count))


@dataclass(slots=True)
class WorkerView:
    """One session of a worker."""

    session: int
    """Number of the session."""
    description: cache_pb2.WorkerDescription = field(default_factory=cache_pb2.WorkerDescription)
    """The worker, without lease, blocks and sequences."""
    pools: dict[int, PoolView] = field(default_factory=lambda: defaultdict(PoolView))
    """Blocks of each group, by its number."""
    sequences: dict[tuple[str, int, int], cache_pb2.SequenceDescription] = field(default_factory=dict)
    """Live sequences by id, attempt and round."""


class PictureView:
    """Apply the pictures of one watcher in order; read the state after each that is complete."""

    def __init__(self) -> None:
        self.epoch = 0
        self.number = 0
        """Number of the last complete picture; 0: there is none yet."""
        self.cluster = cache_pb2.ClusterPicture()
        self._workers: dict[int, WorkerView] = {}

    @property
    def workers(self) -> Mapping[int, WorkerView]:
        """Workers by session."""
        return self._workers

    def apply(self, picture: cache_pb2.Picture) -> bool:
        """Take in one message; returns whether it completes the picture. Raises ProtocolError if its lists differ in length."""
        if picture.whole:
            self._workers.clear()
            self.cluster = cache_pb2.ClusterPicture()
            self.number = 0
        self.epoch = picture.epoch
        if picture.HasField("cluster"):
            self.cluster = picture.cluster
        for session in picture.ended_sessions:
            self._workers.pop(session, None)
        for part in picture.workers:
            self._apply_worker(part)
        if picture.complete:
            self.number = picture.number
        return picture.complete

    def _apply_worker(self, part: cache_pb2.WorkerPicture) -> None:
        worker = self._workers.setdefault(part.session, WorkerView(part.session))
        if part.HasField("worker"):
            worker.description = part.worker
        for blocks in part.blocks:
            if blocks.tier == common_pb2.TIER_DEVICE:
                _apply_blocks(worker.pools[blocks.group], blocks)
        for key in part.ended_sequences:
            worker.sequences.pop((key.sequence_id, key.attempt, key.round), None)
        for sequence in part.sequences:
            worker.sequences[sequence.key.sequence_id, sequence.key.attempt, sequence.key.round] = sequence


def _apply_blocks(pool: PoolView, blocks: cache_pb2.BlockPicture) -> None:
    count = len(blocks.states)
    lists = (blocks.ref_counts, 2), (blocks.last_used, 4), (blocks.salt_numbers, 2)
    if any(len(data) != size * count for data, size in lists) or len(blocks.block_ids) not in (0, count):
        raise ProtocolError("a picture of blocks has lists of different length", reason="PICTURE")
    ref_counts, last_used = _numbers("H", blocks.ref_counts), _numbers("I", blocks.last_used)
    salt_numbers = _numbers("H", blocks.salt_numbers)
    if not blocks.block_ids:
        span = slice(blocks.first_block, blocks.first_block + count)
        pool.grow(span.stop)
        pool.states[span] = blocks.states
        pool.ref_counts[span], pool.last_used[span] = ref_counts, last_used
        pool.salt_numbers[span] = salt_numbers
        return
    pool.grow(max(blocks.block_ids) + 1)
    for block, state, ref_count, used, salt in zip(
        blocks.block_ids, blocks.states, ref_counts, last_used, salt_numbers, strict=True
    ):
        pool.states[block] = state
        pool.ref_counts[block] = ref_count
        pool.last_used[block] = used
        pool.salt_numbers[block] = salt


def _numbers(kind: str, data: bytes) -> array[int]:
    """Decode little-endian numbers."""
    numbers: array[int] = array(kind, data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
