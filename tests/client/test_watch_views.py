"""What a watcher knows, put together from changes: one claim about each change that leaves something behind."""

from __future__ import annotations

from kvpool.client import ContentsView, PictureView
from kvpool.v1 import cache_pb2 as pb


def _stored(node: int, parent: int = 0, group: int = 0) -> pb.ContentEvent:
    stored = pb.ContentStored(node=node, parent=parent, session=1, worker_id="w", group=group)
    return pb.ContentEvent(number=node, stored=stored)


def _removed(node: int, *, session: int = 1, group: int = 0, forgotten: bool = False) -> pb.ContentEvent:
    removed = pb.ContentRemoved(node=node, session=session, group=group, forgotten=forgotten)
    return pb.ContentEvent(number=99, removed=removed)


def _view(*events: pb.ContentEvent) -> ContentsView:
    view = ContentsView()
    view.apply(pb.Contents(epoch=1, whole_begins=True, whole_ends=True, events=events))
    return view


def test_a_worker_has_a_content_as_long_as_any_of_its_groups_has() -> None:
    view = _view(_stored(1), _stored(1, group=1))
    view.apply(pb.Contents(events=[_removed(1)]))
    assert (view.nodes[1].sessions, view.nodes[1].groups) == ({1: "w"}, {1: {1}})
    view.apply(pb.Contents(events=[_removed(1, group=1)]))
    assert (view.nodes[1].sessions, view.nodes[1].groups) == ({}, {})


def test_a_forgotten_content_is_nobodys_child() -> None:
    view = _view(_stored(1), _stored(2, parent=1))
    view.apply(pb.Contents(events=[_removed(2, forgotten=True)]))
    assert list(view.nodes) == [1]
    assert view.nodes[1].children == {}


def test_a_whole_picture_replaces_all_that_was_known() -> None:
    view = PictureView()
    for number, session in ((1, 7), (2, 8)):
        view.apply(
            pb.Picture(epoch=1, number=number, whole=True, complete=True, workers=[pb.WorkerPicture(session=session)])
        )
    assert list(view.workers) == [8]
