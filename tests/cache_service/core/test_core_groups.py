"""Workers with several groups: a pool and a table for each; a prefix is a hit as far as all have it.

The state machine (test_core_state_machine.py) draws workers with one group and with two.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from kvpool.cache_service.core.contents import Removed, Stored
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    AppendItem,
    BlockCounts,
    ContentRun,
    Granted,
    MissCause,
    ReportedBlocks,
    ReportPart,
    ReservedBlock,
    SequenceUpdate,
    TableEntry,
    Uplink,
)
from kvpool.cache_service.core.refusal import Reason, Refusal
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import key, refused, registration, token_bytes
from tests.cache_service.core.model import Refused


def counts_of(worker: Desk) -> tuple[BlockCounts, ...]:
    return worker.session.counts()


def test_a_sequence_has_a_table_of_each_group_out_of_its_own_pool() -> None:
    worker = Desk(num_blocks=(9, 6))
    granted = worker.allocate("a", range(9))
    assert isinstance(granted, Granted)
    assert [table.blocks for table in granted.tables] == [(1, 2, 3), (1, 2, 3)]
    assert [counts.free for counts in counts_of(worker)] == [5, 2]
    worker.free("a", 9)
    assert [counts.cached for counts in counts_of(worker)] == [2, 2]


def test_a_prefix_is_a_hit_only_as_far_as_every_group_has_it() -> None:
    """The small pool has evicted what the large one still has."""
    worker = Desk(num_blocks=(33, 6))
    worker.serve("a", range(13))
    worker.serve("b", range(50, 63))
    assert [counts.cached for counts in counts_of(worker)] == [6, 4]
    (explained,) = worker.manager.explain(ROOT, token_bytes(range(13))).workers
    assert (explained.num_cached_tokens, explained.miss.cause) == (4, MissCause.EVICTED)
    (routed,) = worker.manager.route(ROOT, token_bytes(range(13)))
    assert routed.num_cached_tokens == 4
    granted = worker.allocate("c", range(13))
    assert isinstance(granted, Granted)
    assert granted.num_cached_tokens == 4


def test_a_copy_in_one_group_alone_serves_nothing_and_the_block_computed_again_is_a_duplicate_there() -> None:
    worker = Desk(num_blocks=(33, 5))
    worker.serve("a", range(13))
    worker.serve("b", range(50, 63))
    assert worker.serve("c", range(13)) == 0
    assert counts_of(worker)[0].cached == 6, "the first group had it already: the second copies are free again"
    assert worker.serve("d", range(13)) == 12


def test_where_one_pool_is_short_nothing_is_evicted_in_any() -> None:
    """All or nothing: the large pool would have to evict for it, the small one is full."""
    worker = Desk(num_blocks=(7, 4))
    worker.serve("old", range(9))
    worker.grant("holds", range(50, 58))
    before = [list(pool.free_list()) for pool in worker.session.pools]
    outcome = worker.allocate("a", range(90, 106))
    assert outcome == Refused(Reason.NEVER_FITS)
    assert worker.allocate("a", range(90, 99)) == Refused(Reason.NO_BLOCKS)
    assert [list(pool.free_list()) for pool in worker.session.pools] == before
    assert [pool.num_evicted for pool in worker.session.pools] == [0, 1]


def test_the_refusal_names_the_group_that_is_short() -> None:
    worker = Desk(num_blocks=(9, 4))
    worker.grant("a", range(8))
    item = worker.item("b", range(50, 58))
    (refusal,), _ = worker.manager.allocate(worker.uplink(), [item])
    assert isinstance(refusal, Refusal)
    assert "needed 2 blocks of group 1; worker 'w1' has 1 free and 0 evictable of 3" in refusal.message
    (refusal,), _ = worker.manager.allocate(worker.uplink(), [worker.item("c", range(50, 70))])
    assert isinstance(refusal, Refusal)
    assert "the whole pool of group 1 of worker 'w1' has 3" in refusal.message


def test_each_group_has_a_reserve_of_its_own() -> None:
    """Filled to its own wish, and blocks come back to their own pool."""
    worker = Desk(num_blocks=(9, 9))
    head = worker.uplink()._replace(reserve_wishes=(1, 3))
    worker.lockstep.free(head)
    assert [counts.reserved for counts in counts_of(worker)] == [1, 3]
    generation = worker.manager.last_generation
    head = worker.uplink(downlink_ack=2)._replace(
        reserve_wishes=(None, 1), returned=((), (ReservedBlock(2, generation), ReservedBlock(3, generation)))
    )
    worker.lockstep.free(head)
    assert [counts.reserved for counts in counts_of(worker)] == [1, 1]
    worker.grant("a", range(4))
    bound = tuple((TableEntry(1, 1, generation),) for _ in range(2))
    update = SequenceUpdate(key("a"), 4, token_bytes([4]), 5, bound)
    worker.lockstep.append(worker.uplink(downlink_ack=2), AppendItem(update))
    assert [len(table) for table in worker.session.sequences["a", 1].tables] == [2, 2]


def test_a_table_that_lacks_a_block_in_one_group_has_no_room() -> None:
    """More tokens cannot be computed than the shortest table holds."""
    worker = Desk(num_blocks=(9, 9))
    (spare,) = worker.refill(1)
    worker.grant("a", range(4))
    assert worker.report("a", 5, new_tokens=[4], bound=[TableEntry(1, *spare)]) == Refused(Reason.BAD_FIELD)


def test_an_engine_without_a_reserve_gets_all_its_tables_lengthened() -> None:
    worker = Desk(num_blocks=(9, 6))
    worker.grant("a", range(4))
    appended = worker.report("a", 4, want_blocks=3)
    assert not isinstance(appended, Refused)
    assert [[entry.table_index for entry in entries] for entries in appended.new_entries] == [[1, 2], [1, 2]]
    assert worker.report("a", 4, want_blocks=6) == Refused(Reason.NEVER_FITS)


@pytest.mark.parametrize(
    "change",
    [
        {"reserve_wishes": (None, 1)},
        {"returned": ((), (ReservedBlock(1, 1),))},
    ],
    ids=str,
)
def test_a_group_that_the_worker_does_not_have_is_refused_and_the_call_does_nothing(change: dict[str, Any]) -> None:
    worker = Desk(num_blocks=9)
    head = worker.uplink()._replace(**change)
    refusal = refused(worker.manager.free, head, [])
    assert (refusal.reason, refusal.field) == (Reason.BAD_FIELD, "uplink")
    assert worker.session.last_call_no == 0
    worker.grant("a", range(4))
    bound = ((), (TableEntry(0, 1, 1),))
    (outcome,), _ = worker.manager.append(worker.uplink(), [AppendItem(SequenceUpdate(key("a"), 4, b"", 4, bound))])
    assert isinstance(outcome, Refusal)
    assert outcome.message == "bound: worker 'w1' is registered with 1 groups, got group 1"


def test_followers_of_the_contents_learn_each_group() -> None:
    worker = Desk(num_blocks=(33, 5))
    contents = worker.manager.follow_contents(100)
    while contents.list_some(10):
        pass
    worker.serve("a", range(13))
    worker.serve("b", range(50, 59))
    events = contents.since(0, 100)
    assert events is not None
    stored = [(event.node, event.group) for event in events if isinstance(event, Stored)]
    assert stored == [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 1), (4, 0), (5, 0), (4, 1), (5, 1)]
    removed = [event for event in events if isinstance(event, Removed)]
    assert {(event.group, event.forgotten) for event in removed} == {(1, False)}


def test_a_report_gives_every_group_its_blocks_back() -> None:
    """A content that one group alone holds serves nothing; computed again it does."""
    manager = CacheManager(3)
    introduction = registration(num_blocks=(17, 9))._replace(holds_state=True)
    session = manager.register(introduction, 0.0).session
    old = (1 << 40) + 1
    blocks = ReportedBlocks(0, (5, 6, 7), (old,) * 3), ReportedBlocks(1, (3, 2, 0), (old, old, 0))
    run = ContentRun(0, ROOT, token_bytes(range(12)), 3, blocks)
    part = ReportPart(0, True, (run,), reserve=((), (ReservedBlock(8, old),)), idle_blocks=((7, 6, 5), (2, 3)))
    manager.report(Uplink(session, 1), part)
    assert manager.check().violations == []
    first, second = manager.sessions[0].pools
    assert [block for block in first.free_list() if first.is_cached(block)] == [7, 6, 5]
    assert [block for block in second.free_list() if second.is_cached(block)] == [2, 3]
    assert second.is_reserved(8, old)
    (routed,) = manager.route(ROOT, token_bytes(range(13)))
    assert routed.num_cached_tokens == 8


def test_the_end_of_a_session_leaves_nothing_of_any_group() -> None:
    worker = Desk(num_blocks=(33, 17))
    worker.serve("a", range(21))
    worker.grant("b", range(50, 59))
    holder = worker.session.holder
    worker.manager.deregister(worker.number)
    while worker.manager.sweep():
        pass
    assert worker.manager.num_prefix_nodes == 0
    assert worker.manager.check().violations == []
    assert holder.pools == (), "they refer to their holder: a cycle that nobody would collect"


def test_the_budget_counts_the_blocks_of_all_groups() -> None:
    """New blocks of both pools come out of one budget: what each has room for alone may be too much for both."""
    manager = CacheManager(1, limits=Desk().manager.limits._replace(max_total_blocks=6))
    number = manager.register(registration(num_blocks=(9, 9), block_size=4), 0.0).session
    item = Desk().item("a", range(16))
    (outcome,), _ = manager.allocate(Uplink(number, 1), [item])
    assert isinstance(outcome, Refusal)
    assert outcome.reason is Reason.NEVER_FITS, "its 4 blocks are 8 of the 6 that all workers may have"
    (outcome,), reply = manager.allocate(Uplink(number, 2), [Desk().item("b", range(8))])
    assert isinstance(outcome, Granted)
    assert (manager.budget.num_blocks, [counts.free for counts in reply.counts]) == (4, [2, 2])
    (outcome,), _ = manager.allocate(Uplink(number, 3), [Desk().item("c", range(50, 58))])
    assert isinstance(outcome, Refusal)
    assert outcome.reason is Reason.TOO_MANY_BLOCKS, "each pool alone could have the 2 that are left"
    (outcome,), _ = manager.allocate(Uplink(number, 4), [Desk().item("d", range(50, 54))])
    assert isinstance(outcome, Granted)
    assert manager.budget.num_blocks == 6
    assert manager.check().violations == []


def test_every_stamp_is_one_for_all_groups_of_a_call() -> None:
    worker = Desk(num_blocks=(9, 9))
    stamps = []
    for name in "ab":
        granted = worker.allocate(name, [ord(name)] * 5)
        assert isinstance(granted, Granted)
        (stamp,) = {generation for table in granted.tables for generation in table.generations}
        stamps.append(stamp)
    assert all(before < after for before, after in pairwise(stamps))
