"""The Registers of a worker's process, and its current session: numbers that only grow, and the key.

A Register may be refused because another process has the worker's name. That one may have ended, and then its lease ends too: the
refusal has the time. If the name is still taken after three times that time, the other process renews its lease. More retries
would hide a mistake, so the worker gives up (`Patience`).
"""

from __future__ import annotations

from typing import Final

import grpc

from kvpool.process.call_status import details_of
from kvpool.v1 import cache_pb2

PASSING: Final = frozenset({"STALE_INCARNATION", "WORKER_ELSEWHERE"})
"""Reasons of a refused Register that may pass."""
POLL_SECONDS: Final = 1.0
"""The longest time between two Registers: the other process may leave before its lease ends."""
_LEAST_SECONDS: Final = 0.2
_WAITS: Final = 3.0
"""The worker gives up after this many times the longest wait in a refusal."""


class Patience:
    """State over consecutive refusals. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._longest_wait = _LEAST_SECONDS

    @property
    def is_waiting(self) -> bool:
        """Whether the last Register was refused for such a reason."""
        return self._since is not None

    def restore(self) -> None:
        """Note that a Register had another outcome."""
        self._since, self._longest_wait = None, _LEAST_SECONDS

    def pause(self, wait_seconds: float, now: float) -> float | None:
        """Seconds to the next Register, after a refusal with `wait_seconds`; None: give up."""
        if self._since is None:
            self._since = now
        self._longest_wait = max(self._longest_wait, wait_seconds)
        if now - self._since >= _WAITS * self._longest_wait:
            return None
        return max(_LEAST_SECONDS, min(wait_seconds, POLL_SECONDS))


FINAL = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
"""A Register refused with these would be refused again. Other codes may pass: the manager starts or stops."""


class WorkerRegistration:
    """The Registers of one process, one at a time."""

    def __init__(self, introduction: cache_pb2.RegisterRequest) -> None:
        self.introduction = introduction
        """The fields that are the same in all of them."""
        self.highest_epoch = 0
        """The manager's highest epoch that this process has seen since it last held no blocks."""
        self.session = 0
        """Number of the last session."""
        self.session_key = b""
        self._register_no = 0
        self._answered_no = 0
        """The last Register that was answered or refused."""
        self._is_doubtful = False
        """Whether an earlier Register was not answered: it may have been executed, or be executed later."""
        self.was_last_accepted = True
        """Whether the last Register has started a session. A copy of one that was refused could start one later, if the reason
        passes; the manager remembers only those that it has accepted."""

    @property
    def is_settled(self) -> bool:
        """Whether only another Register can start a session of this process."""
        return self._answered_no == self._register_no and not self._is_doubtful

    def next_request(self, *, holds_state: bool) -> cache_pb2.RegisterRequest:
        """The next Register. Earlier ones are refused if they arrive after it."""
        self._is_doubtful = not self.is_settled
        self.was_last_accepted = False
        self._register_no += 1
        request = cache_pb2.RegisterRequest()
        request.CopyFrom(self.introduction)
        request.register_no = self._register_no
        request.highest_epoch_seen = self.highest_epoch
        request.last_session = self.session
        request.holds_state = holds_state
        return request

    def on_answer(self, response: cache_pb2.RegisterResponse) -> None:
        """The last Register has started a session, and fenced those of the Registers before it."""
        self._answered_no = self._register_no
        self._is_doubtful = False
        self.was_last_accepted = True
        self.highest_epoch = max(self.highest_epoch, response.epoch)
        self.session, self.session_key = response.session, response.session_key

    def on_error(self, error: grpc.aio.AioRpcError) -> None:
        """The last Register was refused or not answered."""
        details = details_of(error)
        if error.code() in FINAL:
            # The manager refuses the others of this process too.
            self._answered_no = self._register_no
            self._is_doubtful = False
        elif details.reason:
            # It was not executed. An earlier unanswered one may still be, if the reason for the refusal passes.
            self._answered_no = self._register_no
            if details.reason == "STALE_REGISTER":
                # Another process has used a larger number, since ours are sent in order. The next one is larger still.
                self._is_doubtful = True
                self._register_no = max(self._register_no, details.number("register_no") or 0)

    def forget_manager(self) -> None:
        """This process holds no blocks: epoch and session of an earlier manager no longer matter."""
        self.highest_epoch = self.session = 0
        self.session_key = b""
