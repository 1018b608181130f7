"""Workers with several groups: a pool and a table for each; a prefix is a hit as far as all have it.

The state machine (test_core_state_machine.py) draws workers with one group and with two.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.cache_service.core.messages import (
    AppendItem,
    BlockCounts,
    Granted,
    MissCause,
    ReservedBlock,
    SequenceUpdate,
    TableEntry,
)
from kvpool.cache_service.core.refusal import Reason, Refusal
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import key, refused, token_bytes


def counts_of(worker: Desk) -> tuple[BlockCounts, ...]:
    return worker.session.counts()


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
