"""The times of one request: waiting, prefill, decode, preempted."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.v1 import worker_pb2


@dataclass(slots=True)
class RequestTimes:
    """Timestamps of one request, in monotonic seconds."""

    arrived_at: float = 0.0
    granted_at: float | None = None
    """When it first got a block table."""
    first_token_at: float | None = None
    last_token_at: float = 0.0
    _preempted_at: float | None = None
    """When it was preempted; None: it is as far as it was before."""
    _num_computed_before: int = 0
    _preempted_prefill: float = 0.0
    _preempted_decode: float = 0.0
    _preempted_since_token: float = 0.0
    """Time preempted since the last token. It counts once there is another token: a request may end before."""

    def on_preempted(self, num_computed_tokens: int, now: float) -> None:
        """Note that it lost its blocks, and with them the KV of so many tokens. If it was not as far again yet, the earlier
        preemption goes on."""
        if self._preempted_at is None:
            self._preempted_at = now
            self._num_computed_before = num_computed_tokens

    def on_computed(self, num_computed_tokens: int, now: float) -> None:
        """Note a step that computed some of its tokens."""
        if self._preempted_at is None or num_computed_tokens < self._num_computed_before:
            return
        self._preempted_since_token += now - self._preempted_at
        self._preempted_at = None

    def on_token(self, now: float) -> None:
        """Note the step that computed its next token."""
        if self.first_token_at is None:
            self.first_token_at = now
            self._preempted_prefill = self._preempted_since_token
        else:
            self._preempted_decode += self._preempted_since_token
        self._preempted_since_token = 0.0
        self.last_token_at = now

    def totals(self) -> worker_pb2.Times | None:
        """The time of each phase, rounded down: together at most the time from arrival to the last token, after which a preemption
        does not count. None without a token."""
        if self.granted_at is None or self.first_token_at is None:
            return None
        prefill = self.first_token_at - self.granted_at - self._preempted_prefill
        decode = self.last_token_at - self.first_token_at - self._preempted_decode
        return worker_pb2.Times(
            waiting_ms=int((self.granted_at - self.arrived_at) * 1000),
            prefill_ms=int(prefill * 1000),
            decode_ms=int(decode * 1000),
            preempted_ms=int((self._preempted_prefill + self._preempted_decode) * 1000),
        )
