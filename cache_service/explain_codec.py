"""Encodes the answer of Explain. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.v1 import cache_pb2, common_pb2

from .core.closest_prompt import ClosestPrompt
from .core.explanation import Explanation, Miss, WorkerExplanation
from .core.messages import MissCause
from .worker_codec import encode_key

_MAX_AGE_MS = (1 << 32) - 1

_CAUSES: Mapping[MissCause, cache_pb2.MissCause] = {
    MissCause.NEVER_SEEN: cache_pb2.MISS_CAUSE_NEVER_SEEN,
    MissCause.EVICTED: cache_pb2.MISS_CAUSE_EVICTED,
    MissCause.OTHER_ROOT: cache_pb2.MISS_CAUSE_OTHER_ROOT,
    MissCause.BEING_COMPUTED: cache_pb2.MISS_CAUSE_BEING_COMPUTED,
    MissCause.PARTIAL_TAIL: cache_pb2.MISS_CAUSE_PARTIAL_TAIL,
    MissCause.LAST_TOKEN: cache_pb2.MISS_CAUSE_LAST_TOKEN,
    MissCause.ON_ANOTHER_WORKER: cache_pb2.MISS_CAUSE_ON_ANOTHER_WORKER,
    MissCause.WINDOW_NOT_KEPT: cache_pb2.MISS_CAUSE_WINDOW_NOT_KEPT,
    MissCause.SNAPSHOT_NOT_KEPT: cache_pb2.MISS_CAUSE_SNAPSHOT_NOT_KEPT,
}
assert _CAUSES.keys() == set(MissCause), "every cause has its name on the wire"


def encode_explanation(explanation: Explanation, epoch: int, now: float) -> cache_pb2.ExplainResponse:
    """Encode the whole answer. `now` is the manager's monotonic time in seconds."""
    closest = explanation.closest
    return cache_pb2.ExplainResponse(
        epoch=epoch,
        workers=[_encode_worker(worker, now) for worker in explanation.workers],
        closest=None if closest is None else _encode_closest(closest),
        num_workers=explanation.num_workers,
    )


def _encode_worker(worker: WorkerExplanation, now: float) -> cache_pb2.WorkerExplanation:
    return cache_pb2.WorkerExplanation(
        worker_id=worker.session.worker_id,
        num_cached_tokens=worker.num_cached_tokens,
        miss=_encode_miss(worker.miss, now),
        encoder_cached=worker.encoder_cached,
    )


def _encode_miss(miss: Miss, now: float) -> cache_pb2.Miss:
    encoded = cache_pb2.Miss(
        position=miss.position, cause=_CAUSES[miss.cause], num_passed_tokens=miss.num_passed_tokens
    )
    if miss.evicted is not None:
        encoded.evicted_ms_ago = min(_MAX_AGE_MS, max(0, round((now - miss.evicted.at) * 1000)))
        if miss.evicted.key is not None:
            encoded.evicted_for.CopyFrom(encode_key(miss.evicted.key))
    if miss.leader is not None:
        encoded.leader.CopyFrom(encode_key(miss.leader.leader))
        encoded.leader_position = miss.leader.position
    if miss.other_root is not None:
        root, encoded.other_block_size, encoded.other_salt, _ = miss.other_root
        encoded.other_root.CopyFrom(
            common_pb2.Root(
                model_fingerprint=root.model_fingerprint, adapter=root.adapter, input_digest=root.input_digest
            )
        )
    if miss.other_worker is not None:
        encoded.other_worker_id = miss.other_worker.worker_id
    return encoded


def _encode_closest(closest: ClosestPrompt) -> cache_pb2.ClosestPrompt:
    return cache_pb2.ClosestPrompt(
        num_equal_tokens=closest.num_equal_tokens,
        prompt_token=closest.prompt_token,
        cached_token=closest.cached_token,
        num_different_tokens=closest.num_different_tokens,
        num_prompts=closest.num_prompts,
        num_tokens_gained=closest.num_tokens_gained,
        truncated=closest.is_truncated,
    )
