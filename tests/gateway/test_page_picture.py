"""The gateway's picture of the cluster, and what browsers make of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.client import ProtocolError, picture_view
from kvpool.gateway.pages.cluster_picture import ClusterPicture
from kvpool.gateway.pages.hub import event_text
from kvpool.v1 import cache_pb2, common_pb2
from tests.gateway.scripted_pictures import Block, BrowserMirror, blocks_picture, one_worker

FREE = (cache_pb2.BLOCK_STATE_FREE, 0, 0, 0)
"""What no picture names."""
BLOCKS = st.tuples(st.integers(1, 5), st.integers(0, 65535), st.integers(0, 2**32 - 1), st.integers(0, 65535))
CHANGES = st.dictionaries(st.integers(1, 40), BLOCKS, max_size=6)
SEQUENCES = st.sets(st.sampled_from("abcdef"), max_size=4)
WORKER_CHANGES = st.tuples(st.integers(1, 3), CHANGES, SEQUENCES, st.booleans())
STEPS = st.lists(
    st.tuples(st.lists(WORKER_CHANGES, max_size=3), st.sets(st.integers(0, 2)), st.booleans()), max_size=12
)


class Truth:
    """The cluster that the pictures are made of."""

    def __init__(self) -> None:
        self.workers: dict[str, dict[int, Block]] = {}
        self.sequences: dict[str, set[str]] = {}
        self._number = 0
        self._num_ended = 0

    def picture(self, changes: list[tuple[int, dict[int, Block], set[str], bool]], whole: bool) -> cache_pb2.Picture:
        """Change, and say what has changed; of two changes of one worker the later counts. A session never comes back."""
        self._number += 1
        picture = cache_pb2.Picture(epoch=1, number=self._number, whole=whole, complete=True)
        if whole:
            self.workers.clear()
            self.sequences.clear()
        for worker_no, blocks, sequences, ends in {change[0]: change for change in changes}.values():
            session = worker_no + 3 * self._num_ended
            name = str(session)
            if ends and not whole:
                if self.workers.pop(name, None) is not None:
                    del self.sequences[name]
                    picture.ended_sessions.append(session)
                    self._num_ended += 1
                continue
            worker = picture.workers.add(session=session, blocks=[blocks_picture(blocks)])
            worker.worker.worker_id = name
            self.workers.setdefault(name, {}).update(blocks)
            known = self.sequences.setdefault(name, set())
            worker.ended_sequences.extend(common_pb2.SequenceKey(sequence_id=gone) for gone in known - sequences)
            for new in sequences - known:
                worker.sequences.add(key=common_pb2.SequenceKey(sequence_id=new), num_tokens=5)
            self.sequences[name] = set(sequences)
        return picture


def of_one_worker() -> ClusterPicture:
    picture = ClusterPicture()
    assert picture.apply(one_worker(1, {1: (2, 0, 0, 0)}, whole=True))
    return picture


def changes(picture: ClusterPicture, since: int = 0) -> Any:
    return json.loads(picture.changes(since))


@settings(max_examples=30)
@given(STEPS)
def test_a_browser_that_misses_pictures_sees_what_one_that_misses_none_sees(
    steps: list[tuple[list[tuple[int, dict[int, Block], set[str], bool]], set[int], bool]],
) -> None:
    """Three browsers take pictures when they like; each then has the whole truth."""
    truth, picture = Truth(), ClusterPicture()
    mirrors, versions = [BrowserMirror() for _ in range(3)], [0, 0, 0]
    for changed, readers, whole in steps:
        assert picture.apply(truth.picture(changed, whole or picture.version == 0))
        for reader in readers:
            mirrors[reader].take(event_text("picture", picture.changes(versions[reader])))
            versions[reader] = picture.version
            shown = mirrors[reader].workers
            assert set(shown) == set(truth.workers)
            for name, blocks in truth.workers.items():
                known = shown[name]["blocks"].get(0, {})
                assert all(known.get(block, FREE) == blocks.get(block, FREE) for block in range(1, 41))
                assert set(shown[name]["sequences"]) == truth.sequences[name]


def test_a_picture_in_parts_is_shown_when_it_is_complete() -> None:
    """A part alone changes nothing, and one of a stream that was lost is forgotten."""
    picture, mirror = of_one_worker(), BrowserMirror()
    before = changes(picture)
    part = one_worker(2, {1: (3, 1, 0, 0)}, whole=False)
    part.complete = False
    assert not picture.apply(part)
    assert changes(picture) == before
    assert picture.apply(one_worker(3, {2: (4, 1, 0, 0)}, whole=True))
    mirror.take(event_text("picture", picture.changes(0)))
    shown = mirror.workers["1"]["blocks"][0]
    assert (shown[1][0], shown[2][0]) == (FREE[0], 4)


def test_a_picture_whose_lists_differ_in_length_is_refused() -> None:
    broken = one_worker(1, {1: (2, 0, 0, 0)}, whole=True)
    broken.workers[0].blocks[0].ref_counts = b"\0\0\0\0"
    with pytest.raises(ProtocolError, match="different length"):
        ClusterPicture().apply(broken)


def test_more_ends_than_are_remembered_give_everything_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory for slow browsers is bounded, and none of them sees a sequence that has ended."""
    monkeypatch.setattr(picture_view, "MAX_ENDED", 3)
    truth, picture, mirror = Truth(), ClusterPicture(), BrowserMirror()
    picture.apply(truth.picture([(1, {}, set("abcdef"), False)], whole=True))
    mirror.take(event_text("picture", picture.changes(0)))
    seen = picture.version
    picture.apply(truth.picture([(1, {}, set(), False)], whole=False))
    mirror.take(event_text("picture", picture.changes(seen)))
    assert (mirror.wholes, mirror.workers["1"]["sequences"]) == (2, {})


def test_one_that_has_the_last_picture_is_sent_nothing_of_it_again() -> None:
    picture = of_one_worker()
    assert changes(picture, picture.version)["workers"] == []


def test_a_sequence_that_is_shown_again_has_not_ended() -> None:
    """It had only left the list of the first ones."""
    truth, picture = Truth(), ClusterPicture()
    for shown in ("a", "", "a"):
        picture.apply(truth.picture([(1, {}, set(shown), False)], whole=picture.version == 0))
    (worker,) = changes(picture, 1)["workers"]
    assert [one["sequence_id"] for one in worker["sequences"]] == ["a"]
    assert "ended_sequences" not in worker


def test_a_whole_picture_replaces_what_is_said_of_the_cluster() -> None:
    picture = ClusterPicture()
    first = one_worker(1, {}, whole=True)
    first.cluster.num_prefix_nodes = 7
    picture.apply(first)
    assert changes(picture)["cluster"]["num_prefix_nodes"] == "7"
    picture.apply(one_worker(1, {}, whole=True))
    assert changes(picture)["cluster"] is None
