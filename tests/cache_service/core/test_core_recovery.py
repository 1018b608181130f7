"""Reports: what a worker says that it holds is taken as it is said, and what contradicts itself ends the session."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.cache_service.core.block_pool import State
from kvpool.cache_service.core.contents import Stored
from kvpool.cache_service.core.manager import REPORT_FIRST_SECONDS, CacheManager
from kvpool.cache_service.core.messages import (
    ContentRun,
    Limits,
    ReportedBlocks,
    ReportedSequence,
    ReservedBlock,
    Root,
    SequenceKey,
    SequenceUpdate,
    TableEntry,
)
from kvpool.cache_service.core.refusal import Reason
from kvpool.cache_service.core.restored import Case
from tests.cache_service.core.lockstep import key, refused, token_bytes
from tests.cache_service.core.reporter import OLD, ROOT, SIZE, Reporter, chain, entries, reserved, run, sequence


def in_blocks(*blocks: int, generations: tuple[int, ...], group: int = 0) -> ContentRun:
    """A chain of one content, with these blocks."""
    return run(1)._replace(blocks=(ReportedBlocks(group, blocks, generations),))


def test_until_the_report_is_complete_nothing_else_is_answered_and_nobody_is_routed_there() -> None:
    worker = Reporter()
    manager = worker.manager
    for call in (
        lambda: manager.allocate(worker.uplink(), []),
        lambda: manager.append(worker.uplink(), []),
        lambda: manager.free(worker.uplink(), []),
    ):
        assert refused(call).reason is Reason.RECOVERING
    worker.report(last=False, contents=(run(3, 4),))
    assert not manager.route(ROOT, token_bytes(range(8)))
    worker.report(1)
    assert worker.cached(*range(8)) == 8
    assert manager.allocate(worker.uplink(), [])[0] == []


def test_a_report_is_listed_for_followers_of_the_contents_once_it_is_complete() -> None:
    """Look-ups do not see it before."""
    worker = Reporter()
    worker.report(last=False, contents=(run(3, 4),))
    contents = worker.manager.follow_contents(100)
    worker.check()
    assert contents.is_complete
    assert contents.since(0, 100) == []
    worker.report(1, contents=(run(7, first=9),))
    worker.check()
    events = contents.since(0, 100)
    assert events is not None
    stored = [event for event in events if isinstance(event, Stored)]
    assert [event.number for event in stored] == [1, 2, 3]
    assert [event.tokens for event in stored] == [token_bytes(range(at, at + SIZE)) for at in (0, SIZE, 9 * SIZE)]
    assert {event.session for event in stored} == {worker.number}


def test_complete_blocks_are_hits_with_their_old_generation() -> None:
    worker = Reporter()
    worker.report(contents=(run(3, 9),))
    (table,) = worker.allocate("a", [*range(8), 99]).tables
    assert (table.blocks[:2], table.generations[:2]) == ((3, 9), (OLD, OLD))
    assert table.generations[2] > 3 << 40


def test_the_order_of_eviction_is_the_one_reported() -> None:
    """What is not listed goes first; what is listed but in a table is passed over."""
    worker = Reporter()
    worker.report(
        contents=(run(1, 2, 3), run(4, first=7), run(5, first=8)),
        sequences=(sequence("a", 5, 4, 1, 6),),
        idle_blocks=((4, 3, 1, 2, 16),),
    )
    order = [block for block in worker.session.pools[0].free_list() if worker.session.pools[0].is_cached(block)]
    assert order == [5, 4, 3, 2]


def test_a_live_sequence_goes_on_where_it_was() -> None:
    """Shared, own and unfinished blocks; then an Append binds a block of the reported reserve, and Free gives all back."""
    worker = Reporter()
    worker.report(
        contents=(run(1, 2),),
        sequences=(sequence("a", 10, 9, 1, 2, 3, cached=4), sequence("b", 7, 5, 1, 7, cached=4)),
        reserve=(reserved(8),),
    )
    pool = worker.session.pools[0]
    assert worker.states(1, 2, 3, 7, 8, 9) == [State.HELD] * 4 + [State.RESERVED, State.FREE]
    assert [pool.ref_count(block) for block in (1, 2, 3, 7)] == [2, 1, 1, 1]
    assert worker.session.sequences["a", 1].num_sealed == 2
    bound = SequenceUpdate(key("a"), 10, token_bytes(range(10, 14)), 13, ((TableEntry(3, 8, OLD),),))
    assert worker.append(bound).num_sealed_tokens == 12
    worker.manager.free(worker.uplink(), [bound, SequenceUpdate(key("b"))])
    worker.check()
    assert worker.states(1, 2, 3, 7, 8) == [State.CACHED] * 3 + [State.FREE] * 2


def test_content_without_a_block_carries_what_hangs_from_it() -> None:
    """The parent was evicted; a request that computes it anew finds the child again."""
    worker = Reporter()
    worker.report(contents=(run(0, 0, 5),))
    assert worker.allocate("a", [*range(12), 99]).num_cached_tokens == 0
    assert worker.manager.reconciled[Case.BLOCKLESS] == 2
    worker.free("a", num_computed_tokens=8)
    assert worker.allocate("b", [*range(12), 99]).num_cached_tokens == 12


def test_content_that_nothing_needs_leaves_nothing_behind() -> None:
    worker = Reporter()
    worker.report(contents=(run(0, 0),))
    assert worker.manager.num_prefix_nodes == 0


def test_of_two_blocks_with_one_content_the_first_serves_and_the_other_is_free_unless_a_table_has_it() -> None:
    worker = Reporter()
    worker.report(contents=(run(1), run(2), run(3)), sequences=(sequence("a", 6, 4, 2, 4),))
    assert worker.states(1, 2, 3) == [State.CACHED, State.HELD, State.FREE]
    assert worker.manager.reconciled[Case.DUPLICATE] == 2
    assert worker.allocate("b", [*range(4), 99]).tables[0].blocks[0] == 1


def test_a_table_may_say_alone_what_its_complete_blocks_hold() -> None:
    """An engine of others may leave the contents out; two tables that share such a block agree on it."""
    worker = Reporter()
    worker.report(sequences=(sequence("a", 9, 8, 1, 2, 3), sequence("b", 6, 4, 1, 4)))
    assert worker.session.pools[0].ref_count(1) == 2
    assert worker.cached(*range(8)) == 8


def test_parts_may_be_repeated_but_not_skipped() -> None:
    worker = Reporter()
    worker.report(0, last=False, contents=(run(1),))
    worker.report(0, last=False, contents=(run(1),))
    refusal = refused(worker.report, 2)
    assert (refusal.reason, refusal.position) == (Reason.GAP, 1)
    worker.report(1, contents=(run(2, parent=1, first=1),))
    worker.report(1, contents=(run(2, parent=1, first=1),))
    assert worker.allocate("a", [*range(8), 9]).num_cached_tokens == 8
    assert refused(worker.report, 2).reason is Reason.GAP


def test_the_contents_of_only_so_many_workers_are_taken_in_at_once() -> None:
    """The third is asked to wait until one of the two is complete, or its session has ended. What is in use waits for nobody."""
    manager = CacheManager(3, limits=Limits(max_reports_at_once=2))
    first, second, third, fourth = (Reporter(manager, f"w{i}") for i in range(4))
    manager.tick(REPORT_FIRST_SECONDS)
    for worker in (first, second):
        worker.report(0, last=False, contents=(run(1),))
    assert refused(third.report, 0, contents=(run(1),)).reason is Reason.RECOVERING
    third.report(0, last=False, live=True, sequences=(sequence("a", 5, 4, 1, 2),), idle_blocks=((3,),))
    assert refused(third.report, 1, contents=(run(3),)).reason is Reason.RECOVERING
    assert third.allocate("b", [90]).tables[0].blocks == (4,)
    first.report(1)
    third.report(1, contents=(run(3),))
    manager.deregister(second.number)
    fourth.report(0, last=False, contents=(run(1),))


def test_the_larger_attempt_stays_wherever_it_lives() -> None:
    """Reported or live, on whichever worker: the smaller one is fenced and its worker told to stop."""
    manager = CacheManager(3)
    here = Reporter(manager, "here")
    here.report(sequences=(sequence("x", 5, 4, 1, 2, attempt=2), sequence("y", 5, 4, 3, 4, attempt=1)))
    there = Reporter(manager, "there")
    there.report(sequences=(sequence("x", 5, 4, 1, 2, attempt=1), sequence("y", 5, 4, 3, 4, attempt=2)))
    for worker, name in ((here, "y"), (there, "x")):
        assert [name for (name, _), one in worker.session.sequences.items() if one.fenced] == [name]
        (entry,) = worker.session.downlink.pending()
        assert entry.entry == (SequenceKey(name, 1, 0),)
        worker.free(name)
    assert (manager.reconciled[Case.FENCES], manager.reconciled[Case.FENCED]) == (1, 1)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_two_attempts_in_one_report_the_larger_stays(order: tuple[int, int]) -> None:
    worker = Reporter()
    tables = {1: (1, 2), 2: (3, 4)}
    worker.report(sequences=tuple(sequence("x", 5, 3, *tables[attempt], attempt=attempt) for attempt in order))
    assert {attempt: s.fenced for (_, attempt), s in worker.session.sequences.items()} == {1: True, 2: False}


def test_of_two_equal_attempts_the_one_that_lives_stays() -> None:
    manager = CacheManager(3)
    Reporter(manager, "here").report(sequences=(sequence("x", 5, 4, 1, 2),))
    late = Reporter(manager, "late")
    late.report(sequences=(sequence("x", 5, 4, 1, 2),))
    assert late.session.sequences["x", 1].fenced


def test_an_interrupted_report_leaves_nothing_behind() -> None:
    """The worker registers again in the middle of it, or never comes back."""
    worker = Reporter()
    worker.report(0, last=False, contents=(run(1, 2, 3),), sequences=(sequence("a", 13, 12, 1, 2, 3, 4),))
    manager = worker.manager
    Reporter(manager, now=0.01).check()
    assert manager.num_prefix_nodes == 0
    manager.tick(1e9)
    worker.check()
    assert manager.sessions == ()


def of_generation(generation: int) -> ReportedSequence:
    """A sequence whose first block it has by another grant."""
    first, second = entries(1, 2)
    return sequence("a", 5, 4)._replace(tables=((first._replace(generation=generation), second),))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"contents": (run(17),)}, "block 17 does not exist"),
        ({"contents": (in_blocks(1, generations=(0,)),)}, "no manager up to this one has given"),
        ({"contents": (in_blocks(1, generations=((3 << 40) + 1,)),)}, "no manager up to this one has given"),
        ({"contents": (in_blocks(1, generations=()),)}, "of group 0, got 1 and 0"),
        ({"contents": (in_blocks(1, generations=(OLD,), group=1),)}, "1 groups, got group 1"),
        ({"reserve": ((), reserved(1))}, "1 groups, got group 1"),
        ({"contents": (run(1)._replace(tokens=b"1234"),)}, "needs 16 bytes"),
        ({"contents": (run(),)}, "a chain of 0 contents"),
        ({"contents": (run(1, parent=1),)}, "which has not come yet"),
        ({"contents": (run(1, root=None),)}, "needs a root"),
        ({"contents": (run(1, root=Root("other")),)}, "needs a root"),
        ({"contents": (run(1), run(1, first=1))}, "reported twice"),
        ({"contents": (run(1), run(2), run(2, first=1))}, "reported twice"),
        ({"contents": (run(1, 2, 17),)}, "block 17 does not exist"),
        ({"contents": (run(*[0] * 4097),)}, "at most 4096 contents per part"),
        ({"reserve": (reserved(1, 1),)}, "reported twice"),
        ({"contents": (run(1),), "reserve": (reserved(1),)}, "reported twice"),
        ({"contents": (run(1), run(2)), "reserve": (reserved(2),)}, "reported twice"),
        ({"sequences": (sequence("a", 5, 4, 1, 2),), "reserve": (reserved(2),)}, "reported twice"),
        ({"sequences": (sequence("a", 5, 4, 1, 2), sequence("a", 5, 4, 3, 4))}, "reported twice"),
        ({"sequences": (sequence("a", 5, 4, 1, 2), sequence("b", 5, 4, 3, 2))}, "reported twice"),
        ({"sequences": (sequence("a", 9, 4, 1, 2, 2),)}, "is twice in the table"),
        ({"contents": (run(1),), "sequences": (sequence("a", 5, 3, 1, 2),)}, "has not computed it yet"),
        ({"contents": (run(1, first=1),), "sequences": (sequence("a", 5, 4, 1, 2),)}, "holds something else"),
        ({"contents": (run(1),), "sequences": (of_generation(4),)}, "holds something else"),
        ({"sequences": (sequence("a", 5, 9, 1, 2),)}, "9 tokens cannot be computed"),
        ({"sequences": (sequence("a", 9, 9, 1, 2),)}, "9 tokens cannot be computed"),
        ({"sequences": (sequence("a", 5, 4, 1, 2, cached=5),)}, "cannot be computed"),
        ({"sequences": (sequence("a", 0, 0),)}, "needed 1 to"),
        ({"sequences": (sequence("", 5, 4, 1, 2),)}, "needed an id"),
        ({"sequences": (sequence("a", 5, 4, 1, 2, attempt=0),)}, "an attempt from 1 on"),
        ({"sequences": (sequence("a", 5, 4, 1, 2)._replace(root=Root("other")),)}, "another model fingerprint"),
        ({"sequences": (sequence("a", 5, 4, 1, 2)._replace(tables=((TableEntry(1, 1, OLD),),)),)}, "from index 0 on"),
    ],
)
def test_a_report_that_cannot_be_ends_the_session(content: dict[str, Any], says: str) -> None:
    """Whatever came before it in the same report goes with it."""
    worker = Reporter()
    worker.report(0, last=False, contents=(run(15, first=90),), sequences=(sequence("before", 3, 2, 16),))
    runs = content.get("contents", ())  # numbered from 1, but one has come before
    moved = tuple(one._replace(parent=one.parent + 1) if one.parent else one for one in runs)
    assert says in worker.bad_report(1, **{**content, "contents": moved})
    assert worker.manager.num_prefix_nodes == 0


# -- windows


def with_window(**more: Any) -> Reporter:
    """Its second group has a window of two blocks and four scratch blocks."""
    return Reporter(num_blocks=(17, 17), windows=((0, 0), (6, 4)), **more)


def in_window(**changes: Any) -> ReportedSequence:
    """One of 18 tokens, 17 of them computed; of its window blocks 1 and 3 are named."""
    named = TableEntry(1, 7, OLD), TableEntry(3, 8, OLD)
    tables, scratch = (entries(1, 2, 3, 4, 5), named), ((), reserved(9, 10))
    return sequence("a", 18, 17)._replace(tables=tables, scratch=scratch, boundaries=(24, 20))._replace(**changes)


OTHER = chain((16,), (15,), first=30)
"""Another content, in block 15 of the group with the window."""


def test_a_report_gives_windows_their_hits_back_and_drops_what_depends_on_nothing() -> None:
    """Of five contents all but the third have a block where it is needed."""
    worker = with_window()
    worker.report(contents=(chain((1, 2, 3, 0, 5), (0, 7, 8, 9, 0)),))
    assert worker.manager.reconciled[Case.DEPENDENT] == 1
    granted = worker.allocate("a", [*range(12), 99])
    assert granted.num_cached_tokens == 12
    assert (granted.tables[1].start, granted.tables[1].blocks) == (1, (7, 8))
    assert worker.session.pools[1].is_free(9)


def test_a_live_sequence_goes_on_with_its_window_its_scratch_and_its_boundaries() -> None:
    worker = with_window()
    worker.report(sequences=(in_window(),), reserve=((), reserved(11)))
    assert worker.manager.reconciled[Case.SCRATCH] == 2
    table = worker.allocate("a", range(18))
    assert table.tables[1] == ((7, 0, 8), (OLD, 0, OLD), 1, reserved(9, 10))
    assert table.boundaries == (20, 24)
    update = SequenceUpdate(
        key("a"),
        18,
        token_bytes([18, 19]),
        20,
        ((), (TableEntry(2, 9, OLD), TableEntry(4, 11, OLD))),
        released=((), (TableEntry(1, 7, OLD), TableEntry(0, 10, OLD))),
    )
    worker.append(update)
    assert worker.allocate("a", range(18)).boundaries == (24,)
    assert worker.allocate("b", [*range(20), 99]).num_cached_tokens == 20
    worker.free("a", "b")
    assert [(counts.held, counts.cached) for counts in worker.session.counts()] == [(0, 5), (0, 4)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scratch": ((), reserved(7))}, "block 7 is twice in what 'a' has"),
        ({"scratch": ((), reserved(9, 9))}, "block 9 is twice"),
        ({"scratch": ((), reserved(15))}, "block 15 is reported twice"),
        ({"scratch": ((), reserved(17))}, "block 17 does not exist"),
        ({"scratch": ((), (ReservedBlock(9, 0),))}, "no manager up to this one"),
        ({"scratch": (reserved(9),)}, "group 0 has no window"),
        ({"scratch": ((), (), ())}, "2 groups, got group 2"),
        ({"tables": ((), (TableEntry(4, 7, OLD),)), "num_computed_tokens": 0}, "are computed blocks"),
        ({"tables": (in_window().tables[0], (TableEntry(4, 7, OLD),))}, "are computed blocks"),
        ({"tables": (in_window().tables[0], (TableEntry(1, 7, OLD), TableEntry(1, 8, OLD)))}, "each of another index"),
        ({"tables": (in_window().tables[0], (TableEntry(1, 15, OLD),))}, "holds something else"),
        ({"boundaries": (16,)}, "all of them still to come"),
        ({"boundaries": tuple(range(20, 56, 4))}, "needed at most 8 boundaries"),
        ({}, ""),
    ],
    ids=str,
)
def test_a_report_of_windows_that_cannot_be_ends_the_session(changes: dict[str, Any], says: str) -> None:
    """The sequence is right without a change."""
    worker = with_window()
    if not changes:
        worker.report(contents=(OTHER,), sequences=(in_window(),))
        assert worker.cached(*range(120, 124)) == 4
        return
    assert says in worker.bad_report(contents=(OTHER,), sequences=(in_window(**changes),))
    assert worker.manager.num_prefix_nodes == 0


# -- several groups


def test_a_report_gives_every_group_its_blocks_back() -> None:
    """A content that one group alone holds serves nothing."""
    worker = Reporter(num_blocks=(17, 9))
    idle = (7, 6, 5), (2, 3)
    worker.report(contents=(chain((5, 6, 7), (3, 2, 0)),), reserve=((), reserved(8)), idle_blocks=idle)
    for pool, cached in zip(worker.session.pools, idle, strict=True):
        assert tuple(block for block in pool.free_list() if pool.is_cached(block)) == cached
    assert worker.session.pools[1].is_reserved(8, OLD)
    assert worker.cached(*range(12)) == 8
