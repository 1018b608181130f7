"""The tree of prefixes: folded where nothing branches, widest first, and asked for a level at a time."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator

from kvpool.client import ContentsView
from kvpool.client.watch import WatchUpdate
from kvpool.gateway.pages.prefix_follower import Prefixes
from kvpool.gateway.pages.prefix_tree import MAX_CHAIN_BLOCKS, entries_after
from kvpool.v1 import cache_pb2 as pb


def stored(node: int, parent: int, session: int = 1) -> pb.ContentEvent:
    """A content of two tokens, which are its number."""
    content = pb.ContentStored(
        node=node, parent=parent, tokens=struct.pack("<2I", node, node), session=session, worker_id=f"w{session}"
    )
    if not parent:
        content.root.model_fingerprint = "m"
    return pb.ContentEvent(number=node, stored=content)


def served(node: int, num_tokens: int) -> pb.ContentEvent:
    return pb.ContentEvent(number=99, served=pb.ContentServed(session=1, node=node, num_cached_tokens=num_tokens))


def whole(*events: pb.ContentEvent, epoch: int = 1) -> pb.Contents:
    return pb.Contents(epoch=epoch, whole_begins=True, whole_ends=True, events=events)


def view_of(*events: pb.ContentEvent) -> ContentsView:
    view = ContentsView()
    view.apply(whole(*events))
    return view


def test_what_does_not_branch_is_one_entry() -> None:
    """1 – 2 – 3 branches into 4 and 5 – 6."""
    view = view_of(stored(1, 0), stored(2, 1), stored(3, 2), stored(4, 3), stored(5, 3), stored(6, 5))
    (entry,), total = entries_after(view, None, 10)
    assert (entry.first.node, entry.last.node, entry.num_blocks, total) == (1, 3, 3, 1)
    below, total = entries_after(view, entry.last, 10)
    assert [(each.first.node, each.last.node) for each in below] == [(4, 4), (5, 6)]
    assert total == 2


def test_a_chain_is_cut_where_other_workers_hold_it() -> None:
    view = view_of(stored(1, 0), stored(1, 0, session=2), stored(2, 1))
    (entry,), _ = entries_after(view, None, 10)
    assert (entry.last.node, sorted(entry.first.sessions.values())) == (1, ["w1", "w2"])


def test_what_saved_most_comes_first_and_counts_for_all_before_it() -> None:
    view = view_of(stored(1, 0), stored(2, 1), stored(3, 1), stored(4, 0), served(3, 4), served(3, 4), served(2, 4))
    view.apply(pb.Contents(epoch=1, events=[served(4, 2)]))
    entries, _ = entries_after(view, None, 10)
    assert [(entry.first.node, entry.first.num_served_tokens) for entry in entries] == [(1, 12), (4, 2)]
    below, _ = entries_after(view, entries[0].last, 10)
    assert [(entry.first.node, entry.first.num_served_tokens) for entry in below] == [(3, 8), (2, 4)]
    assert len(entries_after(view, None, 1)[0]) == 1


def test_a_very_long_chain_is_cut_and_goes_on_below() -> None:
    view = view_of(*(stored(node, node - 1) for node in range(1, MAX_CHAIN_BLOCKS + 3)))
    (entry,), _ = entries_after(view, None, 10)
    assert entry.num_blocks == MAX_CHAIN_BLOCKS
    (rest,), _ = entries_after(view, entry.last, 10)
    assert rest.num_blocks == 2


def test_what_is_forgotten_is_gone_and_a_new_whole_begins_anew() -> None:
    view = view_of(stored(1, 0), stored(2, 1), served(2, 4))
    node = view.nodes.get(2)
    forgotten = pb.ContentRemoved(node=2, session=1, forgotten=True)
    view.apply(pb.Contents(epoch=1, events=[pb.ContentEvent(removed=forgotten)]))
    assert node is not None
    assert view.nodes.get(2) is None
    assert view.nodes[1].num_served_tokens == 4
    view.apply(whole(stored(1, 0), epoch=2))
    (entry,), _ = entries_after(view, None, 10)
    assert (len(view.nodes), entry.first.num_served_tokens) == (1, 0)


async def test_the_contents_are_followed_only_while_somebody_looks() -> None:
    begun = ended = 0

    async def follow() -> AsyncGenerator[WatchUpdate, None]:
        nonlocal begun, ended
        begun += 1
        try:
            yield whole(stored(1, 0))
            await asyncio.Event().wait()
        finally:
            ended += 1

    prefixes = Prefixes(follow)
    assert len((await prefixes.look()).nodes) == 1
    end = prefixes._ending
    await prefixes.look()
    assert (begun, ended) == (1, 0), "one stream for all who look"
    assert end is not None
    assert end.cancelled(), "it is followed for a while after the last look, not after the first"
    prefixes._end()
    await asyncio.gather(prefixes._following or asyncio.sleep(0), return_exceptions=True)
    assert ended == 1
    assert len((await prefixes.look()).nodes) == 1
    await prefixes.close()
    assert (begun, ended) == (2, 2)
