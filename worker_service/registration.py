"""What a worker's process states with each Register, and the session that it was answered: numbers that only grow, and the key."""

from __future__ import annotations

import grpc

from kvpool.process.call_status import details_of
from kvpool.v1 import cache_pb2

FINAL = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
"""A registration that is answered so would be answered so again. Anything else may pass: a manager that starts or stops."""


class Registration:
    """The Registers of one process. One at a time is waited for."""

    def __init__(self, introduction: cache_pb2.RegisterRequest) -> None:
        self.introduction = introduction
        """What is the same in all of them."""
        self.highest_epoch = 0
        """Of the manager, that this process has seen since its books were last empty."""
        self.session = 0
        """The session that was answered last."""
        self.session_key = b""
        """Its secret."""
        self._register_no = 0
        self._answered_no = 0
        """The last Register that the manager has answered in any way."""
        self._is_doubtful = False
        """An earlier Register was not answered: it may have been executed, or be executed later."""

    @property
    def is_settled(self) -> bool:
        """Whether no session of this process can begin any more but by another Register."""
        return self._answered_no == self._register_no and not self._is_doubtful

    def next_request(self, *, holds_state: bool) -> cache_pb2.RegisterRequest:
        """The next Register. It overtakes all before it: those are refused if they come later."""
        self._is_doubtful = not self.is_settled
        self._register_no += 1
        request = cache_pb2.RegisterRequest()
        request.CopyFrom(self.introduction)
        request.register_no = self._register_no
        request.highest_epoch_seen = self.highest_epoch
        request.last_session = self.session
        request.holds_state = holds_state
        return request

    def on_answer(self, response: cache_pb2.RegisterResponse) -> None:
        """The last Register has begun a session, and fenced those of the Registers before it."""
        self._answered_no = self._register_no
        self._is_doubtful = False
        self.highest_epoch = max(self.highest_epoch, response.epoch)
        self.session, self.session_key = response.session, response.session_key

    def on_error(self, error: grpc.aio.AioRpcError) -> None:
        """The last Register was refused or not answered."""
        details = details_of(error)
        if error.code() in FINAL:
            # The others of this process have been, or will be, refused too.
            self._answered_no = self._register_no
            self._is_doubtful = False
        elif details.reason:
            # It was not executed. An earlier one that was not answered may still be, if what it was refused for passes.
            self._answered_no = self._register_no
            if details.reason == "STALE_REGISTER":
                # By a number that is not ours, for ours are stated in order. The next is larger.
                self._is_doubtful = True
                self._register_no = max(self._register_no, details.number("register_no") or 0)

    def forget_manager(self) -> None:
        """The books are empty: what an earlier manager has given is of no use to this process any more."""
        self.highest_epoch = self.session = 0
        self.session_key = b""
