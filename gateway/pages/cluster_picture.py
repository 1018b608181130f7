"""The whole cluster according to the manager's pictures, and its changes since any earlier picture.

The gateway counts its own versions from 1, one for each complete picture of the manager. Every part keeps the version in which it
last changed, so the changes since any version are known, and a browser that reads slowly gets one later picture.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from kvpool.v1 import cache_pb2, common_pb2

from .pool_picture import PoolPicture

MAX_ENDED: Final = 4096
"""Ended sequences that are remembered for slow browsers. A browser that has missed more gets everything anew."""

Key = tuple[str, int, int]
"""Key of a sequence: sequence_id, attempt, round."""


@dataclass(slots=True)
class _Worker:
    """State of one session."""

    pools: dict[int, PoolPicture] = field(default_factory=dict)
    """Blocks by group."""
    description: cache_pb2.WorkerDescription | None = None
    described_at: int = 0
    sequences: dict[Key, tuple[int, cache_pb2.SequenceDescription]] = field(default_factory=dict)
    """Live sequences, each with the version in which it last changed."""
    ended: dict[Key, int] = field(default_factory=dict)
    """Ended sequences, each with the version in which it ended."""


class ClusterPicture:
    """Takes the manager's pictures, and makes those of browsers."""

    def __init__(self) -> None:
        self.version = 0
        """Version of the last complete picture; 0: none yet."""
        self._whole_before = 0
        """A browser with an older version than this gets everything."""
        self._workers: dict[int, _Worker] = {}
        self._ended_sessions: dict[int, int] = {}
        self._cluster: cache_pb2.ClusterPicture | None = None
        self._cluster_at = 0
        self._epoch = 0
        self._number = 0
        self._parts: list[cache_pb2.Picture] = []
        """Messages of a picture that is not complete yet."""
        self._texts: dict[tuple[int, bool], bytes] = {}

    def apply(self, picture: cache_pb2.Picture) -> bool:
        """Take in one message; returns whether a picture is complete now, so that `version` has grown. Raises ValueError for a
        picture that contradicts itself."""
        if picture.whole:
            self._parts.clear()
        self._parts.append(picture)
        if not picture.complete:
            return False
        version = self.version + 1
        for part in self._parts:
            self._apply_part(part, version)
        self._parts.clear()
        self._forget_old_ends(version)
        self.version = version
        self._texts.clear()
        return True

    def interrupt(self) -> None:
        """Note that the manager's stream has ended: the next message does not continue the picture."""
        self._parts.clear()

    def _apply_part(self, picture: cache_pb2.Picture, version: int) -> None:
        if picture.whole:
            self._workers.clear()
            self._ended_sessions.clear()
            self._cluster = None
            self._whole_before = version
        self._epoch, self._number = picture.epoch, picture.number
        for session in picture.ended_sessions:
            if self._workers.pop(session, None) is not None:
                self._ended_sessions[session] = version
        for worker in picture.workers:
            self._apply_worker(worker, version)
        if picture.HasField("cluster"):
            self._cluster, self._cluster_at = picture.cluster, version

    def _apply_worker(self, picture: cache_pb2.WorkerPicture, version: int) -> None:
        worker = self._workers.setdefault(picture.session, _Worker())
        if picture.HasField("worker"):
            worker.description, worker.described_at = picture.worker, version
        for blocks in picture.blocks:
            worker.pools.setdefault(blocks.group, PoolPicture()).apply(blocks, version)
        for key in map(_key, picture.ended_sequences):
            if worker.sequences.pop(key, None) is not None:
                worker.ended[key] = version
        for sequence in picture.sequences:
            key = _key(sequence.key)
            worker.ended.pop(key, None)
            worker.sequences[key] = (version, sequence)

    def _forget_old_ends(self, version: int) -> None:
        if len(self._ended_sessions) + sum(len(worker.ended) for worker in self._workers.values()) > MAX_ENDED:
            self._ended_sessions.clear()
            for worker in self._workers.values():
                worker.ended.clear()
            self._whole_before = version

    def changes(self, since: int, *, include_blocks: bool) -> bytes:
        """Return JSON of all changes after version `since`, or of everything. Browsers that ask for the same share the work."""
        if since < self._whole_before:
            since = 0
        asked = (since, include_blocks)
        if asked not in self._texts:
            text = json.dumps(self._changes(since, include_blocks), separators=(",", ":"))
            self._texts[asked] = text.encode()
        return self._texts[asked]

    def _changes(self, since: int, include_blocks: bool) -> dict[str, Any]:
        show_cluster = self._cluster is not None and self._cluster_at > since
        workers = [
            self._worker_changes(session, worker, since, include_blocks) for session, worker in self._workers.items()
        ]
        return {
            "epoch": str(self._epoch),
            "number": str(self._number),
            "whole": since == 0,
            "cluster": _cluster_json(self._cluster) if show_cluster and self._cluster else None,
            "ended_sessions": [str(session) for session, at in self._ended_sessions.items() if at > since > 0],
            "workers": [worker for worker in workers if since == 0 or len(worker) > 1],
        }

    def _worker_changes(self, session: int, worker: _Worker, since: int, include_blocks: bool) -> dict[str, Any]:
        """Return the changed fields of one worker."""
        changes: dict[str, Any] = {"session": str(session)}
        if worker.description is not None and worker.described_at > since:
            changes["worker"] = _worker_json(worker.description)
        if include_blocks:
            blocks = [
                {"group": group, **entry} for group, pool in worker.pools.items() for entry in pool.as_json(since)
            ]
            if blocks:
                changes["blocks"] = blocks
        if sequences := [_sequence_json(sequence) for at, sequence in worker.sequences.values() if at > since]:
            changes["sequences"] = sequences
        if since and (ended := [key for key, at in worker.ended.items() if at > since]):
            changes["ended_sequences"] = [dict(zip(_KEY_NAMES, key, strict=True)) for key in ended]
        return changes


_KEY_NAMES: Final = ("sequence_id", "attempt", "round")
_COUNTS: Final = ("capacity", "free", "cached", "held", "reserved", "copying", "shared", "withheld")
_NO_COUNTS: Final = common_pb2.BlockCounts()
_LOAD: Final = ("num_running", "num_waiting", "num_uncomputed_tokens")
_TOTALS: Final = ("num_prompt_tokens", "num_cached_tokens", "num_evicted_blocks", "num_calls", "num_generated_tokens")
_BUDGET: Final = ("num_blocks", "max_blocks", "num_slots", "num_sequence_tokens", "max_tokens")


def _key(key: common_pb2.SequenceKey) -> Key:
    return key.sequence_id, key.attempt, key.round


def _cluster_json(cluster: cache_pb2.ClusterPicture) -> dict[str, Any]:
    return {
        "num_prefix_nodes": str(cluster.num_prefix_nodes),
        "num_audits": str(cluster.num_audits),
        "num_violations": cluster.num_violations,
        "budget": {name: str(getattr(cluster.budget, name)) for name in _BUDGET},
    }


def _worker_json(worker: cache_pb2.WorkerDescription) -> dict[str, Any]:
    counts = {pool.group: pool for pool in worker.counts}
    groups = [
        {
            "num_blocks": pool.num_blocks,
            "window_tokens": worker.kv_cache_config.groups[pool.group].sliding_window.window_tokens,
            "has_states": worker.kv_cache_config.groups[pool.group].HasField("state"),
            "max_encoder_tokens": worker.kv_cache_config.groups[pool.group].cross_attention.max_encoder_tokens,
            "counts": {name: getattr(counts.get(pool.group, _NO_COUNTS), name) for name in _COUNTS},
        }
        for pool in worker.kv_cache_config.pools
    ]
    return {
        "worker_id": worker.worker_id,
        "address": worker.address,
        "model_name": worker.model_name,
        "block_size": worker.kv_cache_config.block_size,
        "max_model_len": worker.max_model_len,
        "groups": groups,
        "load": {name: _number(getattr(worker.load, name), name) for name in _LOAD},
        "totals": {name: str(getattr(worker.totals, name)) for name in _TOTALS},
        "num_sequences": worker.num_sequences,
        "draining": worker.draining,
        "recovering": worker.recovering,
    }


def _number(value: int, name: str) -> int | str:
    """Return a 64-bit number as a decimal string: a browser's numbers have 53 bits."""
    return str(value) if name == "num_uncomputed_tokens" else value


def _sequence_json(sequence: cache_pb2.SequenceDescription) -> dict[str, Any]:
    return {
        **dict(zip(_KEY_NAMES, _key(sequence.key), strict=True)),
        "num_tokens": sequence.num_tokens,
        "num_cached_tokens": sequence.num_cached_tokens,
        "num_computed_tokens": sequence.num_computed_tokens,
        "num_blocks": sequence.num_blocks,
        "fenced": sequence.fenced,
    }
