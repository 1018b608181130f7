"""Pictures of the cluster for those who watch it: a viewer gets a whole one first, and then the difference from the one before.

A viewer that misses pictures gets one difference over all of them. One that has missed too many gets a whole picture again, and
until then nothing is kept for it. Viewers that want the same and have seen the same share what is kept. What nobody watches is not
kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from .block_mirror import BlockMirror, Columns
from .facts import ClusterFacts, SequenceFacts, WorkerFacts, cluster_facts, sequence_facts, worker_facts
from .manager import CacheManager
from .messages import SequenceKey

MAX_SEQUENCES = 1000
"""Sequences in one picture, of all workers together."""

MAX_MISSED = 64
"""Pictures that a viewer may miss; after that it gets everything."""


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
        self._mirrors: dict[int, tuple[BlockMirror, ...]] = {}
        """The mirror of each group, by session, if any viewer wants to see the blocks."""
        self._todo: list[BlockMirror] = []
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
        self._mirror_as_wished()
        self._todo.clear()
        self._shown.clear()
        self._changes.clear()

    def step(self) -> bool:
        """Prepare the next picture for some 0.5 ms; returns whether more is left before `take`, which does the rest at once."""
        if not self._todo:
            self._mirror_as_wished()
            self._todo = [mirror for mirrors in self._mirrors.values() for mirror in mirrors]
        while self._todo:
            if self._todo[-1].step(self.number + 1):
                return True
            self._todo.pop()
        return False

    def take(self, num_audits: int = 0, num_violations: int = 0) -> int:
        """Take a picture now, of all workers at this moment; returns its number."""
        self._mirror_as_wished()
        self.number += 1
        self._todo.clear()
        self._shown.clear()
        self._changes.clear()
        for viewer in self._viewers:
            shown = viewer.shown
            if shown and (shown.epoch != self._manager.epoch or shown.number < self.number - MAX_MISSED):
                viewer.shown = None
        oldest = min((viewer.shown.number for viewer in self._viewers if viewer.shown), default=self.number)
        for mirrors in self._mirrors.values():
            for mirror in mirrors:
                mirror.take(self.number, oldest)
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

    def _mirror_as_wished(self) -> None:
        """Mirror the blocks of each live session if any viewer wants to see them, and of no other."""
        wishes = {viewer.wish for viewer in self._viewers if viewer.wish.include_blocks}
        wished = {
            session.number: session
            for session in self._manager.sessions
            if any(wish.shows(session.worker_id) for wish in wishes)
        }
        for number in self._mirrors.keys() - wished.keys():
            for mirror in self._mirrors.pop(number):
                mirror.close()
        for number in wished.keys() - self._mirrors.keys():
            session = wished[number]
            self._mirrors[number] = tuple(
                BlockMirror(session, group, self._manager.salts, self.number + 1) for group in range(len(session.pools))
            )

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
                blocks = tuple(mirror.since(before.number if before else 0) for mirror in self._mirrors[number])
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
