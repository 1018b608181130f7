"""Decides whether a stream may continue on another worker, and sums up usage over its attempts. No I/O."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from .chunk import Usage
from .errors import FailedPrecondition, InvalidRequest, KvpoolError, ResourceExhausted, Unavailable

# Refusals that hold for one worker only: it has fewer blocks than the one that began, or another model by now.
_REASONS_OF_ONE_WORKER: Final = ("NEVER_FITS", "TOO_LARGE")

_OTHER_MODEL: Final = "OTHER_MODEL"
"""The worker has restarted with another model since the request was routed. If no worker has the old model, the request is
tokenised for the model that its name means now."""

_SLOW_READER: Final = "SLOW_READER"
"""The worker ended the stream because it was not read. Another worker's answer would not be read either."""


def another_may_begin(error: KvpoolError) -> bool:
    """Whether a request that has no token yet may be answered by another worker."""
    if error.reason == _SLOW_READER:
        return False
    if error.reason == _OTHER_MODEL:
        return True
    # RESOURCE_EXHAUSTED without a reason is gRPC's own, about the size of a message: the same everywhere.
    return isinstance(error, Unavailable) or (isinstance(error, ResourceExhausted) and error.reason != "")


def another_may_go_on(error: KvpoolError) -> bool:
    """Whether another worker may continue the answer. One worker has accepted the request, so a permanent refusal by the next one
    holds for that worker only."""
    return another_may_begin(error) or (
        isinstance(error, InvalidRequest | FailedPrecondition) and error.reason in _REASONS_OF_ONE_WORKER
    )


class AnswerUsage:
    """Sums up the usage of an answer from its attempts, each of which counts only its own."""

    def __init__(self) -> None:
        self._num_cached = 0
        self._before_ms = 0

    def begin(self, elapsed_ms: float) -> None:
        """Note that an attempt begins, `elapsed_ms` after the start of the call."""
        self._before_ms = int(elapsed_ms)

    def join(self, usage: Usage, base: int) -> Usage:
        """Convert the `usage` of an attempt that began after `base` delivered tokens to the usage of the answer.

        The attempt's prompt includes those tokens, the caller's prompt does not. `num_cached_tokens` is that of the attempt that
        delivered the first token: of a later one it may be more than the prompt.
        """
        if base == 0:
            self._num_cached = usage.num_cached_tokens
        return replace(
            usage,
            num_prompt_tokens=usage.num_prompt_tokens - base,
            num_cached_tokens=self._num_cached,
            num_generated_tokens=base + usage.num_generated_tokens,
            times=None if usage.times is None else replace(usage.times, before_ms=self._before_ms),
        )

    def at_the_end(self, num_prompt: int, num_delivered: int) -> Usage:
        """Return the usage of an answer whose worker left before it sent the last one."""
        return Usage(
            num_prompt_tokens=num_prompt,
            num_cached_tokens=self._num_cached,
            num_generated_tokens=num_delivered,
            num_preemptions=0,
        )
