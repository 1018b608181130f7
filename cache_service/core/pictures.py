"""Pictures of the cluster for those who watch it: one copy of the state for all viewers, and for each what it has not seen yet.

Pictures are numbered. Of everything that a picture shows, the number of the picture in which it last changed is kept, so a viewer
that has seen picture f gets what has changed after f, in one piece, however many pictures it has missed. One that has missed too
many gets everything. What nobody watches is not kept.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .block_mirror import BlockMirror, Columns
from .facts import ClusterFacts, SequenceFacts, WorkerFacts, cluster_facts, sequence_facts, worker_facts
from .manager import CacheManager
from .messages import SequenceKey
from .salts import SaltNumbers
from .session import Session

SLICE_BLOCKS = 512
"""Blocks that one step looks at: some 0.3 ms."""

MAX_SEQUENCES = 1000
"""Sequences in one picture, of all workers together."""

MAX_MISSED = 64
"""Pictures that a viewer may miss; after that it gets everything."""

MAX_LISTED_BLOCKS = 1 << 14
"""Changed blocks of one pool that are listed one by one. If there are more, a copy of the whole pool is sent."""


class Wish(NamedTuple):
    """What a viewer wants to see."""

    worker_id: str = ""
    """Only this worker; empty: all."""
    include_blocks: bool = False
    max_sequences: int = 0
    """Sequences shown of each worker; 0: none. MAX_SEQUENCES bounds all workers together."""

    def shows(self, worker_id: str) -> bool:
        """Whether the worker is wanted."""
        return self.worker_id in ("", worker_id)


class SessionChange(NamedTuple):
    """What has changed of one session."""

    session: int
    facts: WorkerFacts | None
    """None: as before."""
    blocks: tuple[Columns | None, ...]
    """Changed blocks of each group, None for a group without any. Empty if no group has any."""
    sequences: tuple[SequenceFacts, ...]
    """New ones, and those that have changed."""
    ended_sequences: tuple[SequenceKey, ...]


class Change(NamedTuple):
    """What a viewer has not seen yet."""

    epoch: int
    number: int
    """Number of the picture that the viewer has after this change."""
    is_whole: bool
    """It is everything: what the viewer has seen before is void."""
    sessions: tuple[SessionChange, ...]
    ended_sessions: tuple[int, ...]
    cluster: ClusterFacts | None
    """None: as before."""


class Viewer:
    """One that watches. `seen`: number of the picture that it was given last; 0: none, or it needs everything."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.seen = 0


class Pictures:
    """The pictures of one manager. It must take them, `step` by step if the calls of others matter, then `take`."""

    def __init__(self, manager: CacheManager) -> None:
        self.number = 0
        """Number of the last picture."""
        self._manager = manager
        self._epoch = manager.epoch
        self._viewers: dict[Viewer, None] = {}
        self._sessions: dict[int, _WatchedSession] = {}
        self._ended: deque[tuple[int, int]] = deque()
        """Number of the picture, session."""
        self._cluster: tuple[int, ClusterFacts] | None = None
        self._todo: list[Session] = []
        self._changes: dict[tuple[Wish, int], Change] = {}
        """Changes up to the last picture, by what the viewer wants and has seen. Viewers that are alike share one."""

    @property
    def num_viewers(self) -> int:
        """Those that watch."""
        return len(self._viewers)

    def join(self, wish: Wish) -> Viewer:
        """Somebody watches from now on."""
        viewer = Viewer(wish)
        self._viewers[viewer] = None
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """It watches no longer; what only it has watched is dropped. May be repeated."""
        self._viewers.pop(viewer, None)
        for watched in self._sessions.values():
            self._watch_as_wished(watched, self.number + 1)
        if not self._viewers:
            self._sessions.clear()
            self._ended.clear()
            self._todo.clear()
            self._changes.clear()
            self._cluster = None

    def step(self) -> bool:
        """Prepare the next picture for some 0.5 ms; returns whether more is left before `take`, which does the rest at once."""
        if not self._todo:
            self._todo = list(self._manager.sessions)
        while self._todo:
            session = self._todo[-1]
            if not session.retired:
                watched = self._watched(session, self.number + 1)
                if watched.step(self.number + 1):
                    return True
            self._todo.pop()
        return False

    def take(self, num_audits: int = 0, num_violations: int = 0) -> int:
        """Take a picture now, of all workers at this moment; returns its number."""
        manager = self._manager
        self.number += 1
        self._todo.clear()
        self._changes.clear()
        if manager.epoch != self._epoch:
            self._epoch = manager.epoch
            for viewer in self._viewers:
                viewer.seen = 0
        live = {session.number: session for session in manager.sessions}
        for number in [number for number in self._sessions if number not in live]:
            self._sessions.pop(number).stop()
            self._ended.append((self.number, number))
        limits = {viewer.wish.max_sequences for viewer in self._viewers if viewer.wish.max_sequences}
        share = MAX_SEQUENCES // max(1, len(live))
        oldest = self._oldest_seen()
        for session in live.values():
            self._watched(session, self.number).take(self.number, oldest, limits, share)
        facts = cluster_facts(manager, num_audits, num_violations)
        if self._cluster is None or self._cluster[1] != facts:
            self._cluster = self.number, facts
        while self._ended and self._ended[0][0] <= oldest:
            self._ended.popleft()
        return self.number

    def show(self, viewer: Viewer) -> Change:
        """What the viewer has not seen of the last picture; from now on it has. Call it before anything else happens."""
        if viewer.seen < self._oldest_seen():
            viewer.seen = 0
        key = viewer.wish, viewer.seen
        change = self._changes.get(key)
        if change is None:
            change = self._changes[key] = self._since(*key)
        viewer.seen = self.number
        return change

    def _oldest_seen(self) -> int:
        """What has changed after this picture is kept."""
        least = min((viewer.seen for viewer in self._viewers if viewer.seen), default=self.number)
        return max(least, self.number - MAX_MISSED)

    def _since(self, wish: Wish, seen: int) -> Change:
        assert self._cluster is not None, "show before take"
        sessions = []
        for watched in self._sessions.values():
            if wish.shows(watched.session.worker_id):
                change = watched.since(seen, wish)
                if any(change[1:]):
                    sessions.append(change)
        cluster_number, cluster = self._cluster
        return Change(
            self._epoch,
            self.number,
            not seen,
            tuple(sessions),
            tuple(session for number, session in self._ended if number > seen) if seen else (),
            cluster if cluster_number > seen else None,
        )

    def _watched(self, session: Session, number: int) -> _WatchedSession:
        """`number`: of the picture that shows it next."""
        watched = self._sessions.get(session.number)
        if watched is None:
            watched = self._sessions[session.number] = _WatchedSession(session)
        self._watch_as_wished(watched, number)
        return watched

    def _watch_as_wished(self, watched: _WatchedSession, number: int) -> None:
        """Mirror the blocks of a session if any viewer wants to see them, and only then."""
        worker_id = watched.session.worker_id
        if any(viewer.wish.include_blocks and viewer.wish.shows(worker_id) for viewer in self._viewers):
            if not watched.pools:
                watched.start(self._manager.salts, number)
        else:
            watched.stop()


class _WatchedSession:
    """What pictures show of one session, and when it changed."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.pools: tuple[_WatchedPool, ...] = ()
        """The watched pool of each group; empty while no viewer wants to see blocks."""
        self._facts: tuple[int, WorkerFacts] | None = None
        self._sequences: dict[int, _SequenceList] = {}
        """The list of sequences for each number that viewers want at most."""

    def start(self, salts: SaltNumbers, number: int) -> None:
        """Mirror the blocks, from the picture with the number on."""
        groups = range(len(self.session.pools))
        self.pools = tuple(_WatchedPool(BlockMirror(self.session, group, salts), number) for group in groups)

    def stop(self) -> None:
        """Mirror them no longer. May be repeated."""
        for pool in self.pools:
            pool.mirror.close()
        self.pools = ()

    def step(self, number: int) -> bool:
        """Bring the mirrors up to date for the picture `number`, for some 0.5 ms; returns whether more is left."""
        return any(pool.mirror.step(number, SLICE_BLOCKS) for pool in self.pools)

    def take(self, number: int, oldest: int, limits: set[int], share: int) -> None:
        """Note what has changed with the picture `number`; changes up to the picture `oldest` are not needed any more."""
        facts = worker_facts(self.session)
        if self._facts is None or self._facts[1] != facts:
            self._facts = number, facts
        for limit in self._sequences.keys() - limits:
            del self._sequences[limit]
        for limit in limits:
            if limit not in self._sequences:
                self._sequences[limit] = _SequenceList()
            self._sequences[limit].take(self.session, number, oldest, min(limit, share))
        for pool in self.pools:
            pool.take(number, oldest)

    def since(self, seen: int, wish: Wish) -> SessionChange:
        """What has changed after the picture `seen`."""
        assert self._facts is not None
        number, facts = self._facts
        sequences: tuple[SequenceFacts, ...] = ()
        ended: tuple[SequenceKey, ...] = ()
        if wish.max_sequences:
            sequences, ended = self._sequences[wish.max_sequences].since(seen)
        blocks: tuple[Columns | None, ...] = ()
        if wish.include_blocks:
            blocks = tuple(pool.since(seen) for pool in self.pools)
        return SessionChange(
            self.session.number,
            facts if number > seen else None,
            blocks if any(one is not None for one in blocks) else (),
            sequences,
            ended,
        )


class _WatchedPool:
    """The blocks of one group, and when they changed."""

    def __init__(self, mirror: BlockMirror, number: int) -> None:
        """`number`: of the first picture that shows them."""
        self.mirror = mirror
        self._changed: deque[tuple[int, set[int]]] = deque()
        """Number of the picture, blocks that have changed in it; those of some pictures before are not kept."""
        self._kept_after = number
        self._num_listed = 0
        self._columns: Columns | None = None
        """All blocks, of the last picture, once somebody needs them."""

    def take(self, number: int, oldest: int) -> None:
        """Note what has changed with the picture `number`; changes up to the picture `oldest` are not needed any more."""
        self._columns = None
        while self.mirror.step(number, SLICE_BLOCKS):
            pass
        blocks = self.mirror.take_changed()
        if blocks:
            self._changed.append((number, blocks))
            self._num_listed += len(blocks)
        most = min(max(4096, self.mirror.num_known // 8), MAX_LISTED_BLOCKS)
        while self._changed and (self._num_listed > most or self._changed[0][0] <= oldest):
            self._kept_after, dropped = self._changed.popleft()
            self._num_listed -= len(dropped)

    def since(self, seen: int) -> Columns | None:
        """Return the blocks that have changed after the picture `seen`, or all if that is not known any more; None: no block
        has."""
        if seen < self._kept_after:
            if self._columns is None:
                self._columns = self.mirror.columns()
            return self._columns
        changed = [blocks for number, blocks in self._changed if number > seen]
        return self.mirror.columns(changed[0] if len(changed) == 1 else set().union(*changed)) if changed else None


class _SequenceList:
    """The first sequences of a session, and when each of them changed."""

    def __init__(self) -> None:
        self._listed: dict[SequenceKey, tuple[int, SequenceFacts]] = {}
        self._ended: deque[tuple[int, SequenceKey]] = deque()

    def take(self, session: Session, number: int, oldest: int, most: int) -> None:
        """Note what has changed with the picture `number`."""
        before, self._listed = self._listed, {}
        for facts in sequence_facts(session, most):
            earlier = before.pop(facts.key, None)
            self._listed[facts.key] = earlier if earlier is not None and earlier[1] == facts else (number, facts)
        self._ended += [(number, key) for key in before]
        while self._ended and self._ended[0][0] <= oldest:
            self._ended.popleft()

    def since(self, seen: int) -> tuple[tuple[SequenceFacts, ...], tuple[SequenceKey, ...]]:
        """What has changed after the picture `seen`, and which sequences have ended or left the list since."""
        ended = [key for number, key in self._ended if number > seen and key not in self._listed] if seen else ()
        return tuple(facts for number, facts in self._listed.values() if number > seen), tuple(ended)
