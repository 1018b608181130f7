"""Viewers of pictures, whose views are compared with the manager's state after every operation."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from kvpool.cache_service.client_codec import BLOCK_STATES, encode_facts, encode_sequence
from kvpool.cache_service.core.block_pool import CACHED, HELD, BlockPool
from kvpool.cache_service.core.description import describe_block, describe_blocks
from kvpool.cache_service.core.facts import cluster_facts, sequence_facts, worker_facts
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.pictures import Pictures, Viewer, Wish
from kvpool.cache_service.core.session import Session
from kvpool.cache_service.watching.picture_codec import encode
from kvpool.client import PictureView
from kvpool.v1 import cache_pb2
from tests.cache_service.core.kinds import windows


class _Watcher(NamedTuple):
    """A viewer that looks at each `every`-th picture, and leaves and comes back after `life` of them."""

    every: int
    life: int
    wish: Wish
    view: PictureView
    viewer: Viewer


_KINDS = (
    (1, 10_000, Wish(include_blocks=True, max_sequences=3)),
    (3, 10_000, Wish(include_blocks=True, max_sequences=3)),
    (90, 10_000, Wish(include_blocks=True, max_sequences=1000)),
    (2, 20, Wish(include_blocks=True)),
    (1, 7, Wish("w1", include_blocks=True, max_sequences=2)),
)


class PictureFollower:
    """Watches one manager after the other, as they are restarted."""

    def __init__(self) -> None:
        self._manager: CacheManager | None = None
        self._num_operations = 0
        self._used: dict[tuple[int, int, int], tuple[int, int]] = {}
        """By session and block: its generation, and the picture in which that was first seen."""

    def compare(self, manager: CacheManager) -> None:
        """Take a picture; every viewer that looks at it must see the manager as it is."""
        if manager is not self._manager:
            self._manager = manager
            self._pictures = Pictures(manager)
            self._watchers = [self._join(*kind) for kind in _KINDS]
            self._used.clear()
        self._num_operations += 1
        if self._num_operations % 2:  # as the edge does, between calls
            while self._pictures.step():
                pass
        number = self._pictures.take()
        for place, watcher in enumerate(self._watchers):
            if number % watcher.life == 0:
                self._pictures.leave(watcher.viewer)
                watcher = self._watchers[place] = self._join(*_KINDS[place])
            if number % watcher.every == 0:
                for message in encode(self._pictures.show(watcher.viewer)):
                    is_complete = watcher.view.apply(message.picture)
                assert is_complete
                assert (watcher.view.epoch, watcher.view.number) == (manager.epoch, number)
                _compare(manager, watcher.view, watcher.wish)
        self._compare_use(manager, self._watchers[0].view)

    def _join(self, every: int, life: int, wish: Wish) -> _Watcher:
        return _Watcher(every, life, wish, PictureView(), self._pictures.join(wish))

    def _compare_use(self, manager: CacheManager, view: PictureView) -> None:
        """A block with another generation was granted: `last_used` says so, also where it looks as before."""
        for session in manager.sessions:
            if session.recovering:
                continue
            for pool in session.pools:
                last_used = view.workers[session.number].pools[pool.slot].last_used
                for block in range(1, len(last_used)):
                    generation = pool.generation(block)
                    before = self._used.get((session.number, pool.slot, block))
                    if before is not None and before[0] != generation:
                        assert last_used[block] == view.number, f"block {block} was granted again, and nobody sees it"
                    self._used[session.number, pool.slot, block] = generation, view.number


def _compare(manager: CacheManager, view: PictureView, wish: Wish) -> None:
    sessions = [session for session in manager.sessions if wish.shows(session.worker_id)]
    assert view.workers.keys() == {session.number for session in sessions}
    facts = cluster_facts(manager)
    assert view.cluster.num_prefix_nodes == facts.num_prefix_nodes
    assert view.cluster.budget == cache_pb2.Budget(**facts.budget._asdict())
    for session in sessions:
        worker = view.workers[session.number]
        assert worker.description == encode_facts(worker_facts(session))
        share = min(wish.max_sequences, 1000 // len(manager.sessions))
        expected = list(map(encode_sequence, sequence_facts(session, share)))
        found = {(s.key.sequence_id, s.key.attempt, s.key.round) for s in expected}
        assert worker.sequences.keys() == found
        assert all(worker.sequences[s.key.sequence_id, s.key.attempt, s.key.round] == s for s in expected)
        if wish.include_blocks:
            for group, pool in enumerate(session.pools):
                blocks = worker.pools[group]
                blocks.grow(pool.num_blocks)
                for block in describe_blocks(session, group, 1, 0):
                    seen = blocks.states[block.block], blocks.ref_counts[block.block]
                    assert seen == (BLOCK_STATES[block.state], block.ref_count), f"block {block.block} of {session!r}"
                _compare_salts(session, group, blocks.salt_numbers.tolist(), manager)
        else:
            assert not worker.pools


def _compare_salts(session: Session, group: int, numbers: list[int], manager: CacheManager) -> None:
    pool = session.pools[group]
    for block in range(1, pool.num_blocks):
        content = describe_block(session, block, group)
        salt = "" if content.root is None else content.root.tenant_salt
        assert numbers[block] == manager.salts.number(salt), f"block {block} of {session!r}"
        assert content.block[:6] == describe_blocks(session, group, block, 1)[0][:6]
        owners = [
            sequence for sequence in session.sequences.values() if block in session.by_slot[group].blocks(sequence)
        ]
        is_scratch = any(
            window and block in window.scratch for owner in owners for window in windows(owner)[group:][:1]
        )
        if is_scratch:
            assert content.prefix_blocks == (), "only its worker knows what is in it"
        else:
            _compare_prefix(pool, block, content.prefix_blocks)
        if content.root is not None:
            assert set(content.block.owners) == {sequence.key for sequence in owners}
            tables = set().union(*(session.by_slot[group].blocks(sequence) for sequence in owners))
            assert content.owner_blocks == tuple(sorted(tables.difference([block, *content.prefix_blocks])))


def _compare_prefix(pool: BlockPool, block: int, prefix: tuple[int, ...]) -> None:
    if pool.state(block) in (CACHED, HELD):
        assert prefix[-1] == block
        assert all(not before or pool.state(before) in (CACHED, HELD) for before in islice(prefix, len(prefix) - 1))
    else:
        assert prefix == ()
