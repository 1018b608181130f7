"""What the manager must answer to a call in a state: the independent slow model of the core's tests, behind messages.

The order of execution decides the numbers too: each executed Allocate, Append or Free, and each KeepAlive that refills the reserve,
stamps its grants with the generation behind the last, and each accepted Register makes the session behind the last.

Reports are not the model's: `Report` and registrations that hold state are not part of a history.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

from kvpool.cache_service import worker_codec
from kvpool.cache_service.core.messages import Limits
from tests.cache_service.core import model
from tests.linearizability.history import Answer, Done, Operation, Refused, Registered, Routed, Told


class Specification:
    """A state of the manager, and what it does with a call."""

    def __init__(self, last_stamp: int, last_session: int) -> None:
        self.model = model.Model(3600.0, 0.5, Limits())
        self.last_stamp = last_stamp
        self.last_session = last_session

    def copy(self) -> Specification:
        copied: Specification = pickle.loads(pickle.dumps(self, 5))
        return copied

    def digest(self) -> bytes:
        pools = {
            session.number: [
                (pool.free_list, pool.demoted, pool.sealed, pool.reserve_wish, sorted(pool.reserved))
                for pool in session.pools
            ]
            for session in self.model.sessions
        }
        generations = [sorted(pool.generation.items()) for session in self.model.sessions for pool in session.pools]
        sessions = [
            (session.number, session.pending, session.last_number, session.last_call_no, session.sequences)
            for session in self.model.sessions
        ]
        newest = sorted(self.model.newest.items())
        state = self.last_stamp, self.last_session, newest, sessions, pools, generations
        return hashlib.blake2b(repr(state).encode(), digest_size=16).digest()

    def refusal(self, operation: Operation) -> Refused | None:
        """How a call on the link would be turned down as a whole. Changes nothing."""
        request = operation.request
        uplink = getattr(request, "uplink", None)
        if uplink is None:
            return None
        session = next((one for one in self.model.sessions if one.number == uplink.session), None)
        if session is None:
            return Refused("STALE_SESSION")
        return Refused("STALE_CALL") if uplink.call_no <= session.last_call_no else None

    def execute(self, operation: Operation) -> Answer:
        """Let it happen; returns what must be answered."""
        try:
            return self._execute(operation.method, operation.request)
        except model.Refused as refused:
            return Refused(refused.reason.value, refused.position)

    def _execute(self, method: str, request: Any) -> Answer:
        modelled = self.model
        if method == "Register":
            registration = worker_codec.decode_registration(request)
            assert not registration.holds_state, "reports are not the model's"
            modelled.register(registration, self.last_session + 1, 0.0)
            self.last_session += 1
            return Registered(self.last_session, False)
        if method == "Deregister":
            modelled.deregister(request.session)
            return Done()
        if method == "KeepAlive":
            self.last_stamp += modelled.keep_alive(request.session, request.downlink_ack, 0.0, self.last_stamp + 1)
            return self._told(request.session, ())
        if method == "Route":
            root, tokens = worker_codec.decode_root(request.root), model.token_ids(request.tokens)
            serving = [session for session in modelled.sessions if session.takes_prompts]
            reached = [(one.registration.worker_id, *modelled.reach(one, root, tokens)) for one in serving]
            return Routed(tuple(sorted(reached)))
        uplink, stamp = worker_codec.decode_uplink(request), self.last_stamp + 1
        outcomes: Sequence[Any] = ()
        if method == "Allocate":
            outcomes = modelled.allocate(uplink, tuple(map(worker_codec.decode_allocate_item, request.items)), stamp)
        elif method == "Append":
            outcomes = modelled.append(uplink, tuple(map(worker_codec.decode_append_item, request.items)), stamp)
        else:
            assert method == "Free", method
            modelled.free(uplink, tuple(worker_codec.decode_free_items(request.items)), stamp)
        self.last_stamp = stamp
        plain = [Refused(one.reason.value, one.position) if isinstance(one, model.Refused) else one for one in outcomes]
        return self._told(uplink.session, tuple(plain))

    def _told(self, session_number: int, outcomes: tuple[Any, ...]) -> Told:
        session = self.model.session(session_number)
        left = self.model.left(session)
        return Told(outcomes, tuple(session.pending), tuple(pool.counts(left) for pool in session.pools))
