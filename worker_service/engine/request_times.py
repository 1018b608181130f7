"""The times of one request: waiting, prefill, decode, preempted."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import NamedTuple


class EngineTimes(NamedTuple):
    """Seconds of a finished request. Together at most the time from its arrival to its last token."""

    waiting: float
    """Time from arrival to the first block table."""
    prefill: float
    """Time from the first block table to the first token, without the time that it was preempted."""
    decode: float
    """Time from the first token to the last, without the time that it was preempted."""
    preempted: float
    """Time from each preemption until the request was as far as before; what followed the last token does not count."""


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

    def fork(self) -> RequestTimes:
        """The times of a fork that goes on from here."""
        return copy(self)

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

    def totals(self) -> EngineTimes | None:
        """Seconds of each phase; None without a token."""
        if self.granted_at is None or self.first_token_at is None:
            return None
        return EngineTimes(
            waiting=self.granted_at - self.arrived_at,
            prefill=self.first_token_at - self.granted_at - self._preempted_prefill,
            decode=self.last_token_at - self.first_token_at - self._preempted_decode,
            preempted=self._preempted_prefill + self._preempted_decode,
        )
