"""What all workers together may make the manager keep, and what one wish, one reply and one report may."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    AppendItem,
    ContentRun,
    Grant,
    Limits,
    Reply,
    ReportedBlocks,
    ReportedSequence,
    ReportPart,
    ReservedBlock,
    SequenceUpdate,
    Uplink,
    WorkerLoad,
)
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.core.session import SessionEnd
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import Lockstep, key, refused, registration, token_bytes
from tests.cache_service.core.model import Refused


def desks(limits: Limits, *num_blocks: int) -> list[Desk]:
    """Workers of one manager, with blocks of four tokens."""
    lockstep = Lockstep(limits=limits)
    return [Desk(count, 4, worker_id=f"w{i}", lockstep=lockstep) for i, count in enumerate(num_blocks)]


def test_a_declared_pool_costs_nothing_and_may_be_larger_than_the_budget() -> None:
    """Sixteen million blocks: records are made of those that are granted."""
    manager = CacheManager(1, limits=Limits(max_total_blocks=100))
    for i in range(8):
        manager.register(registration(f"w{i}", num_blocks=1 << 24), 0.0)
    session = manager.sessions[0]
    assert all(one.pools[0].num_known <= 8 for one in manager.sessions)
    assert (manager.budget.num_blocks, session.pools[0].counts().free) == (0, 100)
    manager.free(Uplink(session.number, 1, reserve_wishes=(40,)), [])
    assert 40 < session.pools[0].num_known <= 81
    assert manager.budget.num_blocks == 40
    assert manager.check().violations == []


def test_fresh_blocks_are_granted_in_ascending_order_however_far_the_pool_has_grown() -> None:
    """Lockstep compares the whole list with the model's, of which all blocks are there from the beginning."""
    (worker,) = desks(Limits(), 300)
    assert worker.grant("a", [1] * 600).tables[0].blocks == tuple(range(1, 151))
    worker.free("a")
    assert worker.free_list() == list(range(1, 300))


def test_a_refusal_names_the_setting() -> None:
    for limits, tokens, setting in (
        (Limits(max_total_blocks=4), 12, "--max-total-blocks"),
        (Limits(max_total_tokens=19), 12, "--max-total-tokens"),
    ):
        first, second = desks(limits, 33, 33)
        first.serve("a", [1] * 12)
        outcome = second.refusal("b", [2] * tokens)
        assert outcome.reason in (Reason.TOO_MANY_BLOCKS, Reason.TOO_MANY_TOKENS)
        assert setting in outcome.message
        assert outcome.reason.value.rpartition("_")[2].lower() in setting
        assert second.manager.check().violations == []


def test_tokens_of_live_sequences_are_counted_though_they_share_their_blocks() -> None:
    """Also those that Append states; a Free of what was refused seals nothing and ends the sequence."""
    (worker,) = desks(Limits(max_total_tokens=40), 9)
    worker.serve("cache", [1] * 17)
    worker.grant("a", [1] * 17)
    worker.grant("b", [1] * 17, no_wait=True)
    assert worker.manager.budget.num_sequence_tokens == 34
    assert worker.allocate("c", [1] * 7) == Refused(Reason.TOO_MANY_TOKENS)
    assert worker.report("a", 17, new_tokens=[2] * 7) == Refused(Reason.TOO_MANY_TOKENS)
    worker.free("b")
    worker.grant("c", [1] * 7)
    worker.free("a")
    worker.free("c")
    assert worker.manager.budget.num_sequence_tokens == 0


ROOMY = Limits()
LENGTHS: dict[str, tuple[Limits, int, dict[str, Any], int]] = {
    "the pool": (ROOMY, 0, {"num_blocks": 9}, 33),
    "what the worker has registered": (ROOMY, 21, {"num_blocks": 9}, 21),
    "the smaller pool": (ROOMY, 0, {"num_blocks": (33, 9)}, 33),
    "a pool without room for a window": (ROOMY, 0, {"num_blocks": (33, 9), "windows": ((0, 0), (12, 6))}, 33),
    "a pool with room for a window": (ROOMY, 0, {"num_blocks": (33, 10), "windows": ((0, 0), (12, 6))}, 129),
    "blocks of a sequence": (Limits(max_blocks_per_sequence=5), 0, {"num_blocks": 33}, 21),
    "tokens of a sequence": (Limits(max_tokens_per_sequence=30), 0, {"num_blocks": 33}, 30),
    "blocks of all workers": (Limits(max_total_blocks=5), 0, {"num_blocks": 33}, 21),
    "tokens of all workers": (Limits(max_total_tokens=40), 0, {"num_blocks": 33}, 40),
}


@pytest.mark.parametrize(("limits", "registered", "layout", "expected"), LENGTHS.values(), ids=LENGTHS)
def test_the_longest_text_that_is_shown_is_granted_and_no_longer_one(
    limits: Limits, registered: int, layout: dict[str, Any], expected: int
) -> None:
    """What limits it first decides. A worker that takes less than its pool holds says so itself: it does not ask for more."""
    worker = Desk(limits=limits, **layout)
    if registered:
        again = worker.session.registration._replace(register_no=2, max_model_len=registered)
        worker.manager.register(again, 0.0)
        assert worker.session.max_model_len == expected
        return
    assert worker.session.max_model_len == expected
    worker.refusal("more", [1] * expected)
    worker.grant("all", [1] * (expected - 1))


# -- the reserve and the size of a reply


def test_a_large_wish_is_granted_in_bounded_pieces() -> None:
    """2^24 blocks wished for: each call and heartbeat brings a piece, until the bound of the reserve is reached."""
    limits = Limits(max_reserve_blocks=20, max_blocks_per_grant=8)
    (worker,) = desks(limits, 65)
    reply = worker.lockstep.free(worker.uplink(reserve_wish=1 << 24))
    sizes = []
    while isinstance(reply, Reply) and reply.entries:
        sizes += [len(entry.entry.blocks) for entry in reply.entries if isinstance(entry.entry, Grant)]
        reply = worker.lockstep.keep_alive(worker.number, reply.entries[-1].number)
    assert sizes == [8, 8, 4]
    assert worker.counts.reserved == 20
    assert Limits().max_blocks_per_grant <= 1 << 13
    assert Limits().max_reserve_blocks <= 1 << 20


def test_entries_beyond_the_size_of_a_reply_are_held_back_in_order() -> None:
    """A worker that acknowledges nothing gets the same first entries again and again."""
    limits = Limits(max_blocks_per_grant=4, max_blocks_per_reply=10)
    manager = CacheManager(1, limits=limits)
    session = manager.register(registration(num_blocks=65), 0.0).session
    for call_no in range(1, 6):
        reply = manager.free(Uplink(session, call_no, reserve_wishes=(20,)), [])
        assert [entry.number for entry in reply.entries] == [1, 2][:call_no]
    reply = manager.keep_alive(session, 1, WorkerLoad(), 0.0)
    assert [entry.number for entry in reply.entries] == [2, 3]
    reply = manager.keep_alive(session, 3, WorkerLoad(), 0.0)
    assert [entry.number for entry in reply.entries] == [4, 5]
    # One entry that is larger than a reply may be is sent all the same.
    large = CacheManager(1, limits=Limits(max_blocks_per_reply=1))
    number = large.register(registration(num_blocks=65), 0.0).session
    assert len(large.free(Uplink(number, 1, reserve_wishes=(20,)), []).entries) == 1


def test_a_batch_ends_where_the_answer_is_full() -> None:
    """What does not live yet waits; what lives must be answered with its table, so a session that asks for too much ends."""
    manager = CacheManager(1, limits=Limits(max_blocks_per_reply=4))
    session = manager.register(registration(num_blocks=65), 0.0).session
    items = [AllocateItem(key(f"s{i}"), ROOT, token_bytes([i] * 12)) for i in range(3)]
    outcomes, _ = manager.allocate(Uplink(session, 1), items)
    assert [isinstance(outcome, Refusal) for outcome in outcomes] == [False, False, True]
    assert isinstance(outcomes[2], Refusal)
    assert outcomes[2].reason is Reason.NOT_TRIED
    manager.allocate(Uplink(session, 2), items[2:])
    wanting = [AppendItem(SequenceUpdate(key(f"s{i}")), 7) for i in range(3)]
    appended, _ = manager.append(Uplink(session, 3), wanting)
    assert [getattr(outcome, "reason", None) for outcome in appended] == [None, Reason.NOT_TRIED, Reason.NOT_TRIED]
    assert refused(manager.allocate, Uplink(session, 4), items).reason is Reason.STALE_SESSION
    assert manager.sessions == ()
    assert manager.ended[SessionEnd.REPLY_TOO_LARGE] == 1
    assert manager.check().violations == []


# -- reports


def reporting(limits: Limits, num_blocks: int = 1 << 24) -> tuple[CacheManager, int]:
    """A manager whose one worker has registered with state."""
    manager = CacheManager(3, limits=limits)
    return manager, manager.register(registration(num_blocks=num_blocks)._replace(holds_state=True), 0.0).session


def contents(*blocks: int) -> ContentRun:
    """A chain in these blocks, 0 for none."""
    tokens = b"".join(token_bytes([i] * 4) for i in range(len(blocks)))
    return ContentRun(
        0, ROOT, tokens, len(blocks), (ReportedBlocks(0, blocks, tuple(int(block > 0) for block in blocks)),)
    )


def test_a_report_may_be_of_as_much_as_the_budget() -> None:
    """Up to the highest block that an earlier manager can have granted, and content without a block beside it."""
    manager, session = reporting(Limits(max_total_blocks=10))
    manager.report(Uplink(session, 1), ReportPart(0, True, (contents(7, 0, 9),)))
    assert manager.budget.num_blocks == 10
    assert manager.sessions[0].pools[0].counts()[:3] == ((1 << 24) - 1, 7, 2)
    assert manager.check().violations == []


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (ReportPart(0, True, (contents(11),)), Reason.TOO_MANY_BLOCKS),
        (ReportPart(0, True, (contents(1, *[0] * 10),)), Reason.TOO_MANY_BLOCKS),
        (ReportPart(0, True, reserve=((ReservedBlock(11, 1),),)), Reason.TOO_MANY_BLOCKS),
        (
            ReportPart(0, True, sequences=(ReportedSequence(key("a"), ROOT, bytes(404), 0, 0, ()),)),
            Reason.TOO_MANY_TOKENS,
        ),
    ],
)
def test_a_report_of_more_is_refused_and_ends_the_session(part: ReportPart, reason: Reason) -> None:
    manager, session = reporting(Limits(max_total_blocks=10, max_total_tokens=100))
    refusal = refused(manager.report, Uplink(session, 1), part)
    assert refusal.reason is reason
    assert "--max-total" in refusal.message
    assert manager.sessions == ()
    assert manager.ended[SessionEnd.OVER_BUDGET] == 1
    while manager.sweep():
        pass
    assert (manager.budget.num_blocks, manager.budget.num_sequence_tokens, manager.num_prefix_nodes) == (0, 0, 0)
    assert manager.check().violations == []


def test_a_part_that_names_a_high_block_is_taken_in_after_the_pool_has_grown() -> None:
    """In pieces, between which others are served: the same part is asked for again."""
    manager, session = reporting(Limits(max_growth_per_report_part=1000))
    part = ReportPart(0, True, (contents(50_000),))
    refusals = []
    for call_no in range(1, 20):
        try:
            manager.report(Uplink(session, call_no), part)
            break
        except Refusal as refusal:
            refusals.append((refusal.reason, manager.sessions[0].pools[0].counts().cached))
    assert len(refusals) >= 2
    assert set(refusals) == {(Reason.RECOVERING, 0)}
    assert manager.sessions[0].pools[0].counts().cached == 1
    assert manager.check().violations == []


def test_a_reported_sequence_makes_nodes_only_where_its_table_has_blocks() -> None:
    """A million tokens and no block would be a million nodes that nothing counts."""
    manager, session = reporting(Limits())
    sequence = ReportedSequence(key("a"), ROOT, token_bytes(range(400)), 0, 0, ())
    manager.report(Uplink(session, 1), ReportPart(0, True, sequences=(sequence,)))
    assert manager.num_prefix_nodes == 0
    assert manager.check().violations == []
