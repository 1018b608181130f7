"""Forks as a worker states them: what is shared, who holds it, and what the order of statements may be."""

from __future__ import annotations

import pytest

from kvpool.cache_service.core.messages import Appended, Limits, ReservedBlock, SequenceKey, Stop
from kvpool.cache_service.core.refusal import Reason
from tests.cache_service.core.desk import Desk
from tests.cache_service.core.lockstep import key, snapshot
from tests.cache_service.core.model import Refused


def _desk(
    num_tokens: int = 10, *, num_reserved: int = 4, limits: Limits | None = None
) -> tuple[Desk, list[ReservedBlock]]:
    """A worker whose sequence `p` has computed its prompt; and its reserve."""
    desk = Desk(limits=limits)
    desk.grant("p", range(1, 1 + num_tokens))
    desk.report("p", num_tokens)
    return desk, desk.refill(num_reserved)


def test_a_fork_shares_sealed_blocks_and_binds_its_own() -> None:
    desk, reserve = _desk()
    [outcome] = desk.fork(desk.fork_item("p", "c", 2, new_tokens=[9, 10, 77], bound=reserve[:1]))
    assert outcome == Appended(8)
    assert desk.table("c") == [*desk.table("p")[:2], reserve[0].block]
    assert (desk.counts.shared, desk.counts.held) == (2, 4)


def test_a_fork_may_be_the_parent_of_a_later_one() -> None:
    """Also in the same call, and when those before it have ended."""
    desk, reserve = _desk()
    child = desk.fork_item("p", "c", 2, num_computed_tokens=12, new_tokens=[9, 10, 7, 7], bound=reserve[:1])
    grandchild = desk.fork_item("c", "g", 3, new_tokens=[5], bound=reserve[1:2])
    assert desk.fork(child, grandchild) == [Appended(12), Appended(12)]
    desk.free("p")
    desk.free("c")
    assert desk.table("g") == [*desk.table("g")[:2], reserve[0].block, reserve[1].block]
    desk.free("g")
    assert desk.counts.held == 0


@pytest.mark.parametrize("num_shared_blocks", [2, 1 << 20])
def test_blocks_that_are_not_sealed_are_not_shared(num_shared_blocks: int) -> None:
    """The parent may be writing them. The refusal says how far it is known, so that it is stated first."""
    desk, reserve = _desk()
    desk.grant("q", [7] * 10)
    desk.report("q", 7)
    item = desk.fork_item("q", "c", num_shared_blocks, bound=reserve[:1])
    before = snapshot(desk.manager)
    assert desk.fork(item) == [Refused(Reason.GAP, 4)]
    assert snapshot(desk.manager).nodes == before.nodes
    desk.report("q", 10)
    assert desk.fork(desk.fork_item("q", "c", 2, bound=reserve[:1])) == [Appended(8)]


@pytest.mark.parametrize(
    ("parent", "fork", "reason"),
    [
        (SequenceKey("p", 1, 1), key("c"), Reason.UNKNOWN_SEQUENCE),
        (SequenceKey("p", 2, 0), key("c"), Reason.UNKNOWN_SEQUENCE),
        (key("c"), key("c"), Reason.UNKNOWN_SEQUENCE),
        (key("p"), SequenceKey("old", 1, 1), Reason.FREE_FIRST),
        (key("p"), SequenceKey("newer", 1, 0), Reason.STALE_ATTEMPT),
        (key("p"), SequenceKey("elsewhere", 1, 0), Reason.SEQUENCE_ELSEWHERE),
    ],
)
def test_a_fork_is_refused_that_cannot_be(parent: SequenceKey, fork: SequenceKey, reason: Reason) -> None:
    desk, _ = _desk()
    other = Desk(worker_id="w2", lockstep=desk.lockstep)
    other.grant(SequenceKey("newer", 2, 0), [5])
    other.grant("elsewhere", [5])
    desk.grant("old", [6])
    item = desk.fork_item("p", fork, 2)._replace(parent=parent)
    assert desk.fork(item) == [Refused(reason)]


def test_a_fork_fences_its_smaller_attempts() -> None:
    """The request goes on on another worker, and forks there as it did here."""
    desk, reserve = _desk()
    other = Desk(worker_id="w2", lockstep=desk.lockstep)
    desk.fork(desk.fork_item("p", "c", 2, new_tokens=[9], bound=reserve[:1]))
    second = SequenceKey("p", 2, 0)
    other.grant(second, range(1, 11))
    other.report(second, 10)
    own = other.refill(1)
    assert other.fork(other.fork_item(second, SequenceKey("c", 2, 0), 2, new_tokens=[9], bound=own)) == [Appended(8)]
    stops = [entry.entry for entry in desk.session.downlink.pending() if isinstance(entry.entry, Stop)]
    assert [stop.key for stop in stops] == [key("p"), key("c")]
    [outcome] = desk.fork(desk.fork_item("p", "d", 2))
    assert outcome == Refused(Reason.STALE_ATTEMPT), "a fenced parent has no more forks"
    assert desk.allocate("p", range(1, 11)) == Refused(Reason.STALE_ATTEMPT), "nor is it allocated again"


def test_tokens_that_were_copied_are_not_counted_as_generated() -> None:
    desk, reserve = _desk()
    desk.fork(desk.fork_item("p", "c", 2, new_tokens=[9, 10, 77, 78], bound=reserve[:1]))
    assert desk.session.num_generated_tokens == 2
