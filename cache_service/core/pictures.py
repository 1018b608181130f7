"""Pictures of the cluster for those who watch it: a viewer gets a whole one first, and then the difference from the one before.

A viewer that misses pictures gets one difference over all of them. One that has missed too many gets a whole picture again, and
until then nothing is kept for it. Viewers that want the same and have seen the same share what is kept. What nobody watches is not
kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from .block_mirror import BlockMirror, Columns
from .facts import ClusterFacts, SequenceFacts, WorkerFacts, cluster_facts, sequence_facts, worker_facts
from .manager import CacheManager
from .messages import SequenceKey

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


class _ShownSession(NamedTuple):
    """What a picture shows of one session, without its blocks."""

    facts: WorkerFacts | None
    sequences: Mapping[SequenceKey, SequenceFacts]


_NOTHING: Final = _ShownSession(None, {})


class _Shown(NamedTuple):
    """What a picture shows to viewers with the same wish, without blocks."""

    epoch: int
    number: int
    cluster: ClusterFacts
    sessions: Mapping[int, _ShownSession]


class Viewer:
    """One that watches."""

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.shown: _Shown | None = None
        """The picture that it has; None: none, or it needs everything."""


class Pictures:
    """The pictures of one manager. It must take them, `step` by step if the calls of others matter, then `take`."""

    def __init__(self, manager: CacheManager) -> None:
        self.number = 0
        """Number of the last picture."""
        self._manager = manager
        self._viewers: dict[Viewer, None] = {}
        self._pools: dict[int, tuple[_WatchedPool, ...]] = {}
        """The pool of each group, by session, if any viewer wants to see the blocks."""
        self._todo: list[_WatchedPool] = []
        self._cluster: ClusterFacts | None = None
        self._shown: dict[Wish, _Shown] = {}
        """What the last picture shows, by wish, to viewers that have looked."""
        self._changes: dict[tuple[Wish, int], Change] = {}
        """Changes up to the last picture, by the wish and the number of the picture that the viewer has."""

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
        self._watch_as_wished()
        self._shown.clear()
        self._changes.clear()

    def step(self) -> bool:
        """Prepare the next picture for some 0.5 ms; returns whether more is left before `take`, which does the rest at once."""
        if not self._todo:
            self._watch_as_wished()
            self._todo = [pool for pools in self._pools.values() for pool in pools]
        while self._todo:
            if self._todo[-1].mirror.step(self.number + 1, SLICE_BLOCKS):
                return True
            self._todo.pop()
        return False

    def take(self, num_audits: int = 0, num_violations: int = 0) -> int:
        """Take a picture now, of all workers at this moment; returns its number."""
        self._watch_as_wished()
        self.number += 1
        self._todo.clear()
        self._shown.clear()
        self._changes.clear()
        oldest = self._oldest_shown()
        for pools in self._pools.values():
            for pool in pools:
                pool.take(self.number, oldest)
        self._cluster = cluster_facts(self._manager, num_audits, num_violations)
        return self.number

    def show(self, viewer: Viewer) -> Change:
        """What the viewer has not seen of the last picture; from now on it has. Call it before anything else happens."""
        before, viewer.shown = viewer.shown, self._show(viewer.wish)
        key = viewer.wish, 0 if before is None else before.number
        change = self._changes.get(key)
        if change is None:
            change = self._changes[key] = self._difference(viewer.wish, before, viewer.shown)
        return change

    def _watch_as_wished(self) -> None:
        """Mirror the blocks of each live session if any viewer wants to see them, and of no other."""
        wishes = {viewer.wish for viewer in self._viewers if viewer.wish.include_blocks}
        wished = {
            session.number: session
            for session in self._manager.sessions
            if any(wish.shows(session.worker_id) for wish in wishes)
        }
        for number in self._pools.keys() - wished.keys():
            for pool in self._pools.pop(number):
                pool.mirror.close()
        for number in wished.keys() - self._pools.keys():
            mirrors = [
                BlockMirror(wished[number], group, self._manager.salts) for group in range(len(wished[number].pools))
            ]
            self._pools[number] = tuple(_WatchedPool(mirror, self.number + 1) for mirror in mirrors)

    def _oldest_shown(self) -> int:
        """Return the number of the oldest picture that any viewer has. One that is too old is void."""
        for viewer in self._viewers:
            shown = viewer.shown
            if shown and (shown.epoch != self._manager.epoch or shown.number < self.number - MAX_MISSED):
                viewer.shown = None
        return min((viewer.shown.number for viewer in self._viewers if viewer.shown), default=self.number)

    def _show(self, wish: Wish) -> _Shown:
        shown = self._shown.get(wish)
        if shown is None:
            assert self._cluster is not None, "show before take"
            sessions = list(self._manager.sessions)
            most = min(wish.max_sequences, MAX_SEQUENCES // max(1, len(sessions)))
            shown_sessions = {
                session.number: _ShownSession(
                    worker_facts(session), {facts.key: facts for facts in sequence_facts(session, most)}
                )
                for session in sessions
                if wish.shows(session.worker_id)
            }
            shown = self._shown[wish] = _Shown(self._manager.epoch, self.number, self._cluster, shown_sessions)
        return shown

    def _difference(self, wish: Wish, before: _Shown | None, now: _Shown) -> Change:
        known = {} if before is None else before.sessions
        changes = []
        for number, (facts, sequences) in now.sessions.items():
            known_facts, known_sequences = known.get(number, _NOTHING)
            blocks: tuple[Columns | None, ...] = ()
            if wish.include_blocks:
                blocks = tuple(pool.since(0 if before is None else before.number) for pool in self._pools[number])
            change = SessionChange(
                number,
                facts if facts != known_facts else None,
                blocks if any(columns is not None for columns in blocks) else (),
                tuple(one for key, one in sequences.items() if one != known_sequences.get(key)),
                tuple(key for key in known_sequences if key not in sequences),
            )
            if any(change[1:]):
                changes.append(change)
        return Change(
            now.epoch,
            now.number,
            before is None,
            tuple(changes),
            tuple(number for number in known if number not in now.sessions),
            now.cluster if before is None or before.cluster != now.cluster else None,
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
