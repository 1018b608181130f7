"""Workers that take new prompts, by model and in the order of their load, so that Route need not look at each of them.

Calls say which session they have touched; what has become of it is looked at by the next Route. A session is filed under its
*load*: the work that it has queued, in tokens of prefill. Sessions of one load are in the order of the hashes of their names, a
ring, from which a prompt takes those that follow its own hash. So equal prompts meet on the same few of many workers that are
equally busy, whoever comes and goes. (D. Karger et al., "Consistent Hashing and Random Trees", STOC 1997; among those few the
choice is by rendezvous hashing, because arcs of a ring differ much in length.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from .copies import Holder
from .hashing import HashFunction
from .session import Session

SEQUENCE_COST_TOKENS = 16
"""Cost of a sequence on a worker for a new one, in tokens of prefill: large enough to spread equal prompts over idle workers before
a short prefix draws them all to one."""


class Place(NamedTuple):
    """A session's place on the ring of its load, ordered by the hash of its name. Sessions have no order, so the number breaks
    ties."""

    name_hash: int
    number: int
    session: Session


class ServedModel(NamedTuple):
    """What is served of a model by all of its workers together."""

    newest: Session
    """Its worker's facts are those of the model."""
    max_model_len: int
    """The largest of all workers."""
    longest_input: int
    """Of an encoder, in tokens; the largest of all workers."""


class ModelCandidates:
    """The workers of one model. `loads`: where each is filed."""

    def __init__(self) -> None:
        self.loads: dict[Session, int] = {}
        self.by_holder: dict[Holder, Session] = {}
        self.block_sizes: Counter[int] = Counter()
        self.num_dependent = 0
        """Workers that have dependent groups."""
        self._places: dict[Session, Place] = {}
        self._sorted: list[int] = []
        """The loads that there are, least first."""
        self._rings: dict[int, list[Place]] = {}
        """The ring of each load: places in ascending order. A load without workers has none."""
        self._by_number: list[tuple[int, Session]] = []
        """The session that began last comes last."""
        self._lengths: list[int] = []
        """max_model_len of each worker, least first."""
        self._input_lengths: list[int] = []

    def __len__(self) -> int:
        return len(self.loads)

    def served(self) -> ServedModel | None:
        """None: there is no worker."""
        if not self.loads:
            return None
        return ServedModel(self._by_number[-1][1], self._lengths[-1], self._input_lengths[-1])

    def all_take(self, num_tokens: int, num_encoder_tokens: int) -> bool:
        """Whether each worker has room for a text, and an encoder's input, of these lengths."""
        return not self.loads or (
            num_tokens <= self._lengths[0] and (not num_encoder_tokens or num_encoder_tokens <= self._input_lengths[0])
        )

    def rings(self) -> Iterator[tuple[int, list[Place]]]:
        """Load and ring of the workers that have it, the least load first."""
        for load in self._sorted:
            yield load, self._rings[load]

    def file(self, session: Session, load: int, hash_function: HashFunction) -> None:
        """The session has this load from now on."""
        place = self._places.get(session)
        if place is None:
            place = self._places[session] = Place(hash_function(session.name), session.number, session)
            self.by_holder[session.holder] = session
            self.block_sizes[session.block_size] += 1
            self.num_dependent += bool(session.dependents)
            insort(self._by_number, (session.number, session))
            insort(self._lengths, session.max_model_len)
            insort(self._input_lengths, session.longest_input)
        elif self.loads[session] == load:
            return
        else:
            self._take_out(self.loads[session], place)
        self.loads[session] = load
        ring = self._rings.get(load)
        if ring is None:
            ring = self._rings[load] = []
            insort(self._sorted, load)
        insort(ring, place)

    def drop(self, session: Session) -> None:
        """It takes no new prompts any more. Idempotent."""
        place = self._places.pop(session, None)
        if place is None:
            return
        self._take_out(self.loads.pop(session), place)
        del self.by_holder[session.holder]
        self.num_dependent -= bool(session.dependents)
        del self._by_number[bisect_left(self._by_number, session.number, key=_number)]
        del self._lengths[bisect_left(self._lengths, session.max_model_len)]
        del self._input_lengths[bisect_left(self._input_lengths, session.longest_input)]
        self.block_sizes[session.block_size] -= 1
        if not self.block_sizes[session.block_size]:
            del self.block_sizes[session.block_size]

    def _take_out(self, load: int, place: Place) -> None:
        ring = self._rings[load]
        del ring[bisect_left(ring, place)]
        if not ring:
            del self._rings[load]
            del self._sorted[bisect_left(self._sorted, load)]


class Candidates:
    """The workers that take new prompts, of all models."""

    def __init__(self, hash_function: HashFunction) -> None:
        self._hash_function = hash_function
        self._models: dict[str, ModelCandidates] = {}
        self.touched: dict[Session, None] = {}
        """Sessions of which something may have changed since the last look that Route looks at. Whoever changes them notes it."""

    def drop(self, session: Session) -> None:
        """A session has ended."""
        self.touched.pop(session, None)
        self._drop(session)

    def of_model(self, fingerprint: str) -> ModelCandidates:
        """Return the candidates of a model after the touched sessions have been looked at again; empty if no worker takes prompts
        for it."""
        for session in self.touched:
            self._look_at(session)
        self.touched.clear()
        return self._models.get(fingerprint) or ModelCandidates()

    def _look_at(self, session: Session) -> None:
        if not takes_prompts(session):
            self._drop(session)
            return
        fingerprint = session.registration.model_fingerprint
        model = self._models.get(fingerprint)
        if model is None:
            model = self._models[fingerprint] = ModelCandidates()
        model.file(session, load_of(session), self._hash_function)

    def _drop(self, session: Session) -> None:
        fingerprint = session.registration.model_fingerprint
        model = self._models.get(fingerprint)
        if model is not None:
            model.drop(session)
            if not model.loads:
                del self._models[fingerprint]


def _number(numbered: tuple[int, Session]) -> int:
    return numbered[0]


def takes_prompts(session: Session) -> bool:
    """Whether it serves text, seems to hear the manager, is known whole enough to be served, and is not leaving."""
    is_there = not (session.retired or session.draining or session.recovering or session.is_unheard)
    return is_there and bool(session.registration.address)


def load_of(session: Session) -> int:
    """Tokens to compute, and sequences as tokens, that a new prompt has before it. Sequences that were granted since the worker's
    last heartbeat count."""
    load = session.load
    num_running = max(len(session.sequences), load.num_running)
    return load.num_uncomputed_tokens + SEQUENCE_COST_TOKENS * (num_running + load.num_waiting)
