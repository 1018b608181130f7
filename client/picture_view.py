"""The present state of a cluster, put together from the pictures of Client.watch; each part has the version of its last change."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from kvpool.v1 import cache_pb2, common_pb2

from .errors import ProtocolError

MAX_ENDED: Final = 4096
"""Ended sessions and sequences whose versions are kept, together."""


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
    changed_at: array[int] = field(default_factory=lambda: array("Q"))
    """Version of the view in which each block last changed."""

    def grow(self, num_blocks: int) -> None:
        """Extend the lists to at least `num_blocks`; new blocks are free."""
        count = num_blocks - len(self.states)
        if count > 0:
            self.states += bytes([cache_pb2.BLOCK_STATE_FREE]) * count
            for column in (self.ref_counts, self.last_used, self.salt_numbers, self.changed_at):
                column.frombytes(bytes(column.itemsize * count))


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
    described_at: int = 0
    """Version of the view in which the description last changed."""
    sequences_at: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """Version in which each sequence last changed; also of those that have ended, in which they ended."""


class PictureView:
    """Apply the pictures of one watcher in order. Each complete picture makes the next version of the view, and each part of the
    view has the version in which it last changed: a reader that has seen an earlier version finds what it lacks. It lacks
    everything if it has seen none since `whole_at`."""

    def __init__(self) -> None:
        self.epoch = 0
        self.number = 0
        """Number of the last complete picture; 0: there is none yet."""
        self.version = 0
        """Complete pictures so far."""
        self.whole_at = 0
        """Version in which everything was new, or before which it is not known what has ended."""
        self.cluster = cache_pb2.ClusterPicture()
        self.cluster_at = 0
        """Version in which it last changed."""
        self.ended_sessions: dict[int, int] = {}
        """Version in which each ended session ended."""
        self.workers: dict[int, WorkerView] = {}
        """Workers by session."""
        self._parts: list[cache_pb2.Picture] = []
        """Messages of a picture that is not complete yet."""

    def apply(self, picture: cache_pb2.Picture) -> bool:
        """Take in one message; returns whether it completes the picture, which only then is in the view. Raises ProtocolError if
        its lists differ in length."""
        if picture.whole:
            self._parts.clear()  # of a stream that broke off
        self._parts.append(picture)
        if not picture.complete:
            return False
        parts, self._parts = self._parts, []
        for part in parts:
            self._apply_part(part, self.version + 1)
        self.epoch, self.number = picture.epoch, picture.number
        self.version += 1
        self._forget_ended()
        return True

    def _apply_part(self, picture: cache_pb2.Picture, version: int) -> None:
        if picture.whole:
            self.workers.clear()
            self.ended_sessions.clear()
            self.cluster, self.cluster_at = cache_pb2.ClusterPicture(), 0
            self.whole_at = version
        if picture.HasField("cluster"):
            self.cluster, self.cluster_at = picture.cluster, version
        for session in picture.ended_sessions:
            self.workers.pop(session, None)
            self.ended_sessions[session] = version
        for part in picture.workers:
            self._apply_worker(part, version)

    def _apply_worker(self, part: cache_pb2.WorkerPicture, version: int) -> None:
        worker = self.workers.setdefault(part.session, WorkerView(part.session))
        if part.HasField("worker"):
            worker.description, worker.described_at = part.worker, version
        for blocks in part.blocks:
            if blocks.tier == common_pb2.TIER_DEVICE:
                _apply_blocks(worker.pools[blocks.group], blocks, version)
        for key in map(_key, part.ended_sequences):
            worker.sequences.pop(key, None)
            worker.sequences_at[key] = version
        for sequence in part.sequences:
            key = _key(sequence.key)
            worker.sequences[key], worker.sequences_at[key] = sequence, version

    def _forget_ended(self) -> None:
        workers = self.workers.values()
        num_ended = len(self.ended_sessions) + sum(
            len(worker.sequences_at) - len(worker.sequences) for worker in workers
        )
        if num_ended > MAX_ENDED:
            self.whole_at = self.version
            self.ended_sessions.clear()
            for worker in workers:
                worker.sequences_at = {key: worker.sequences_at[key] for key in worker.sequences}


def _key(key: common_pb2.SequenceKey) -> tuple[str, int, int]:
    return key.sequence_id, key.attempt, key.round


def _apply_blocks(pool: PoolView, blocks: cache_pb2.BlockPicture, version: int) -> None:
    import numpy as np  # its import takes a while, and most clients watch nothing

    count = len(blocks.states)
    lists = {name: (getattr(blocks, name), kind) for name, kind in LISTS}
    if any(len(data) != int(kind[1]) * count for data, kind in lists.values()) or (
        len(blocks.block_ids) not in (0, count)
    ):
        raise ProtocolError("a picture of blocks has lists of different length", reason="PICTURE")
    where = np.array(blocks.block_ids, np.int64) if blocks.block_ids else blocks.first_block + np.arange(count)
    pool.grow(int(where.max(initial=-1)) + 1)
    for name, (data, kind) in lists.items():
        np.frombuffer(getattr(pool, name), kind)[where] = np.frombuffer(data, f"<{kind}")
    np.frombuffer(pool.changed_at, "u8")[where] = version


LISTS: Final = (("states", "u1"), ("ref_counts", "u2"), ("last_used", "u4"), ("salt_numbers", "u2"))
"""Lists of BlockPicture and PoolView, with the type of their entries."""
