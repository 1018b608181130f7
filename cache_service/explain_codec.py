"""Encodes the answer of Explain. Pure functions."""

from __future__ import annotations

from kvpool.v1 import cache_pb2

from .core.explanation import BlockMiss, PromptExplanation, SessionExplanation
from .core.messages import BlockMissCause
from .worker_codec import encode_key, encode_unsalted_root

_MAX_AGE_MS = (1 << 32) - 1

_CAUSES: dict[BlockMissCause, cache_pb2.MissCause] = {
    cause: getattr(cache_pb2, f"MISS_CAUSE_{cause.name}") for cause in BlockMissCause
}


def encode_explanation(explanation: PromptExplanation, epoch: int, now: float) -> cache_pb2.ExplainResponse:
    """Encode the whole answer. `now` is the manager's monotonic time in seconds."""
    closest = explanation.closest
    return cache_pb2.ExplainResponse(
        epoch=epoch,
        workers=[_encode_worker(worker, now) for worker in explanation.workers],
        closest=None if closest is None else cache_pb2.ClosestPrompt(**closest._asdict()),
        num_workers=explanation.num_workers,
    )


def _encode_worker(worker: SessionExplanation, now: float) -> cache_pb2.WorkerExplanation:
    return cache_pb2.WorkerExplanation(
        worker_id=worker.session.worker_id,
        num_cached_tokens=worker.num_cached_tokens,
        miss=_encode_miss(worker.miss, now),
        encoder_cached=worker.encoder_cached,
    )


def _encode_miss(miss: BlockMiss, now: float) -> cache_pb2.Miss:
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
        encoded.other_root.CopyFrom(encode_unsalted_root(root))
    if miss.other_worker is not None:
        encoded.other_worker_id = miss.other_worker.worker_id
    return encoded
