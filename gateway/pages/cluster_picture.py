"""Makes the pictures of browsers: the changes of the cluster's view since any of its versions, as JSON."""

from __future__ import annotations

import base64
import json
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvpool.client import PictureView, PoolView, WorkerView
from kvpool.client.picture_view import LISTS
from kvpool.v1 import cache_pb2, common_pb2


class ClusterPicture:
    """The cluster as the manager's pictures show it, for browsers that have seen different versions of it."""

    def __init__(self) -> None:
        self._view = PictureView()
        self._texts: dict[int, bytes] = {}

    @property
    def version(self) -> int:
        """Version of the view, which each complete picture of the manager raises; 0: there is none yet."""
        return self._view.version

    def apply(self, picture: cache_pb2.Picture) -> bool:
        """Take in one message; returns whether `version` has grown. Raises ProtocolError for a picture that contradicts itself."""
        is_complete = self._view.apply(picture)
        if is_complete:
            self._texts.clear()
        return is_complete

    def changes(self, since: int) -> bytes:
        """Return JSON of all changes after version `since`, or of everything. Browsers that ask for the same share the work."""
        if since < self._view.whole_at:
            since = 0
        if since not in self._texts:
            self._texts[since] = json.dumps(_changes(self._view, since), separators=(",", ":")).encode()
        return self._texts[since]


def _changes(view: PictureView, since: int) -> dict[str, Any]:
    workers = [_worker_changes(worker, since) for worker in view.workers.values()]
    return {
        "epoch": str(view.epoch),
        "number": str(view.number),
        "whole": since == 0,
        "cluster": _cluster_json(view.cluster) if view.cluster_at > since else None,
        "ended_sessions": [str(session) for session, at in view.ended_sessions.items() if at > since > 0],
        "workers": [worker for worker in workers if since == 0 or len(worker) > 1],
    }


def _worker_changes(worker: WorkerView, since: int) -> dict[str, Any]:
    """Return the changed fields of one worker."""
    changes: dict[str, Any] = {"session": str(worker.session)}
    if worker.described_at > since:
        changes["worker"] = _worker_json(worker.description)
    parts = [_blocks(group, pool, since) for group, pool in worker.pools.items()]
    if blocks := [part for part in parts if part is not None]:
        changes["blocks"] = blocks
    changed = [key for key, at in worker.sequences_at.items() if at > since]
    if sequences := [_sequence_json(worker.sequences[key]) for key in changed if key in worker.sequences]:
        changes["sequences"] = sequences
    if since and (ended := [key for key in changed if key not in worker.sequences]):
        changes["ended_sequences"] = [dict(zip(_KEY_NAMES, key, strict=True)) for key in ended]
    return changes


def _blocks(group: int, pool: PoolView, since: int) -> dict[str, Any] | None:
    """Return the blocks of a group that have changed after version `since`, 0: all; None: there are none."""
    where: npt.NDArray[np.int64] | slice = slice(None)
    ids = None
    if since:
        where = np.flatnonzero(np.frombuffer(pool.changed_at, "u8") > since)
        ids = _base64(where.astype("u4"))
    if not pool.states or ids == "":
        return None
    columns = {name: _base64(np.frombuffer(getattr(pool, name), kind)[where]) for name, kind in LISTS}
    return {"group": group, "first": 0 if ids is None else None, "ids": ids, **columns}


def _base64(column: npt.NDArray[Any]) -> str:
    """Encode numbers, little-endian."""
    return base64.b64encode(column.astype(column.dtype.newbyteorder("<")).tobytes()).decode()


_KEY_NAMES: Final = ("sequence_id", "attempt", "round")
_SEQUENCE: Final = ("num_tokens", "num_cached_tokens", "num_computed_tokens", "num_blocks", "fenced")
_WORKER: Final = (
    "worker_id", "address", "model_name", "max_model_len", "num_sequences", "draining", "recovering",
)  # fmt: skip
_COUNTS: Final = ("capacity", "free", "cached", "held", "reserved", "copying", "shared", "withheld")
_NO_COUNTS: Final = common_pb2.BlockCounts()
_TOTALS: Final = ("num_prompt_tokens", "num_cached_tokens", "num_evicted_blocks", "num_calls", "num_generated_tokens")
_BUDGET: Final = ("num_blocks", "max_blocks", "num_slots", "num_sequence_tokens", "max_tokens")


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
        **{name: getattr(worker, name) for name in _WORKER},
        "block_size": worker.kv_cache_config.block_size,
        "groups": groups,
        "load": {
            "num_running": worker.load.num_running,
            "num_waiting": worker.load.num_waiting,
            "num_uncomputed_tokens": str(worker.load.num_uncomputed_tokens),  # a browser's numbers have 53 bits
        },
        "totals": {name: str(getattr(worker.totals, name)) for name in _TOTALS},
    }


def _sequence_json(sequence: cache_pb2.SequenceDescription) -> dict[str, Any]:
    return {name: getattr(sequence.key, name) for name in _KEY_NAMES} | {
        name: getattr(sequence, name) for name in _SEQUENCE
    }
