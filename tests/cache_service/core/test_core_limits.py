"""Everything that a peer can make the manager keep or walk through is bounded, and a refusal tells what to do about it."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.cache_service.core.description import MAX_BLOCKS_PER_PAGE, MAX_OWNERS_PER_BLOCK
from kvpool.cache_service.core.groups.dense import DenseSpec
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    AppendItem,
    Granted,
    Layout,
    Limits,
    ReservedBlock,
    Root,
    SequenceKey,
    SequenceUpdate,
    TableEntry,
    Uplink,
)
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.core.session_key import SessionKey
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import FINGERPRINT, Lockstep, key, refused, registration, snapshot, token_bytes
from tests.cache_service.core.model import Refused

LIMITS = Limits(
    max_workers=2,
    max_sequences_per_session=3,
    max_tokens_per_sequence=20,
    max_items_per_call=4,
    max_blocks_per_pool=64,
    max_block_size=8,
    max_id_bytes=10,
    max_name_bytes=12,
    max_known_incarnations=3,
    max_downlink_entries=2,
)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"worker_id": ""}, "worker_id", ["1 to 10 bytes", "got 0"]),
        ({"worker_id": "x" * 11}, "worker_id", ["1 to 10 bytes", "got 11"]),
        ({"worker_id": "é" * 6}, "worker_id", ["got 12"]),
        ({"address": "x" * 13}, "address", ["0 to 12 bytes", "got 13"]),
        ({"model_fingerprint": ""}, "model_fingerprint", ["1 to 10 bytes"]),
        ({"model_fingerprint": "x" * 11}, "model_fingerprint", ["got 11"]),
        ({"model_name": "x" * 13}, "model_name", ["0 to 12", "got 13"]),
        ({"facts_digest": b"x" * 33}, "facts_digest", ["at most 32 bytes", "got 33"]),
        ({"engine": "x" * 13}, "engine", ["0 to 12", "got 13"]),
        ({"layout": Layout(0, (DenseSpec(8),))}, "kv_cache_config.block_size", ["power of two", "1 to 8", "got 0"]),
        ({"layout": Layout(3, (DenseSpec(8),))}, "kv_cache_config.block_size", ["power of two", "got 3"]),
        ({"layout": Layout(16, (DenseSpec(8),))}, "kv_cache_config.block_size", ["got 16"]),
        ({"layout": Layout(-4, (DenseSpec(8),))}, "kv_cache_config.block_size", ["got -4"]),
        ({"layout": Layout(4, (DenseSpec(1),))}, "kv_cache_config.pools[0]", ["2 to 64", "got 1", "null block"]),
        ({"layout": Layout(4, ())}, "kv_cache_config.groups", ["1 to 16 groups", "got 0"]),
        ({"layout": Layout(4, (DenseSpec(8),) * 17)}, "kv_cache_config.groups", ["got 17"]),
        ({"layout": Layout(4, (DenseSpec(8), DenseSpec(65)))}, "kv_cache_config.pools[1]", ["got 65"]),
        ({"layout": Layout(4, (DenseSpec(65),))}, "kv_cache_config.pools[0]", ["got 65"]),
    ],
)
def test_a_malformed_registration_names_the_field(changes: dict[str, object], field: str, words: list[str]) -> None:
    manager = CacheManager(1, limits=LIMITS)
    introduction = registration()._replace(**changes)  # type: ignore[arg-type]
    refusal = refused(manager.register, introduction, 0.0)
    assert (refusal.reason, refusal.field) == (Reason.BAD_FIELD, field)
    assert all(word in refusal.message for word in words), refusal.message
    assert manager.sessions == ()
    assert manager.register(registration(), 0.0).session


def test_max_workers() -> None:
    manager = CacheManager(1, limits=LIMITS)
    manager.register(registration("a"), 0.0)
    manager.register(registration("b"), 0.0)
    refusal = refused(manager.register, registration("c"), 0.0)
    assert refusal.reason is Reason.TOO_MANY_WORKERS
    assert "2 workers" in refusal.message
    assert "deregister" in refusal.message
    session = manager.register(registration("b", register_no=2), 0.0)
    manager.deregister(session.session)
    manager.register(registration("c"), 0.0)


def desk(num_blocks: int = 33) -> Desk:
    """A worker under the small limits."""
    return Desk(num_blocks, 4, limits=LIMITS)


def test_max_items_per_call() -> None:
    """The whole call is refused before it counts, so the same call_no may go out again with fewer items."""
    worker = desk()
    items = [AllocateItem(key(f"s{i}"), ROOT, token_bytes([i])) for i in range(5)]
    before = snapshot(worker.manager)
    for call in (
        lambda: worker.manager.allocate(Uplink(worker.number, 1), items),
        lambda: worker.manager.append(Uplink(worker.number, 1), [AppendItem(SequenceUpdate(key("s")))] * 5),
        lambda: worker.manager.free(Uplink(worker.number, 1), [SequenceUpdate(key("s"))] * 5),
    ):
        refusal = refused(call)
        assert (refusal.reason, refusal.field) == (Reason.BAD_FIELD, "items")
        assert all(word in refusal.message for word in ("at most 4", "got 5", "several calls"))
        assert snapshot(worker.manager) == before
    worker.lockstep.allocate(Uplink(worker.number, 1), *items[:3])


def test_max_sequences_per_session() -> None:
    """One too many is refused alone: those behind it in the batch are tried, and one that lives gets its table."""
    worker = desk()
    outcomes = worker.allocate_batch(*(worker.item(f"s{i}", [i]) for i in range(3)))
    assert not any(isinstance(outcome, Refusal) for outcome in outcomes)
    again = worker.allocate_batch(worker.item("s3", [3]), worker.item("s2", [2]))
    assert again == [Refused(Reason.TOO_MANY_SEQUENCES), outcomes[2]]
    refusal = item_refusal(worker, AllocateItem(key("s3"), ROOT, token_bytes([3])))
    assert all(word in refusal.message for word in ("'w1'", "3 live sequences", "Free some"))


def item_refusal(worker: Desk, item: AllocateItem | AppendItem) -> Refusal:
    """The refusal of one item, which has changed nothing but the call's own count and stamp."""
    before = snapshot(worker.manager).sessions[0]
    outcomes: list[object]
    if isinstance(item, AllocateItem):
        outcomes = [*worker.manager.allocate(worker.uplink(), [item])[0]]
    else:
        outcomes = [*worker.manager.append(worker.uplink(), [item])[0]]
    after = snapshot(worker.manager).sessions[0]
    assert after[1] == before[1]
    worker.manager.check()
    (refusal,) = outcomes
    assert isinstance(refusal, Refusal), refusal
    return refusal


GOOD = AllocateItem(key("s"), ROOT, token_bytes(range(5)))


@pytest.mark.parametrize(
    ("item", "field", "words"),
    [
        (GOOD._replace(key=key("")), "key.sequence_id", ["1 to 10 bytes", "got 0"]),
        (GOOD._replace(key=key("x" * 11)), "key.sequence_id", ["got 11"]),
        (GOOD._replace(key=key("s", attempt=0)), "key.attempt", ["1 or more"]),
        (GOOD._replace(tokens=b""), "tokens", ["one or more", "got 0 bytes"]),
        (GOOD._replace(tokens=b"12345"), "tokens", ["uint32", "got 5 bytes"]),
        (GOOD._replace(tokens=token_bytes(range(20))), "tokens", ["20 tokens", "1 new", "limit of 20"]),
        (GOOD._replace(max_new_tokens=16), "tokens", ["5 tokens", "16 new"]),
        (GOOD._replace(root=Root("other")), "root.model_fingerprint", [f"'{FINGERPRINT}'", "'other'", "'w1'"]),
        (GOOD._replace(root=Root(FINGERPRINT, adapter="x" * 13)), "root.adapter", ["at most 12", "got 13"]),
        (GOOD._replace(root=Root(FINGERPRINT, tenant_salt="x" * 13)), "root.tenant_salt", ["at most 12", "got 13"]),
        (
            GOOD._replace(root=Root(FINGERPRINT, input_digest=b"x")),
            "root.input_digest",
            ["SHA-256", "32 bytes", "got 1"],
        ),
    ],
)
def test_a_malformed_allocate_names_the_field(item: AllocateItem, field: str, words: list[str]) -> None:
    refusal = item_refusal(desk(), item)
    assert (refusal.reason, refusal.field) == (Reason.BAD_FIELD, field)
    assert all(word in refusal.message for word in words), refusal.message


def test_what_can_never_fit_is_told_so_with_the_figures() -> None:
    """A request larger than the whole pool is not kept waiting: it names blocks needed, blocks there, and the settings."""
    worker = Desk(num_blocks=5, block_size=4)
    refusal = item_refusal(worker, GOOD._replace(max_new_tokens=13))
    assert (refusal.reason, refusal.field) == (Reason.NEVER_FITS, "tokens")
    words = ["5 prompt tokens", "13 new", "5 blocks of 4", "has 4", "--num-blocks", "--kv-cache-memory", "max_tokens"]
    assert all(word in refusal.message for word in words), refusal.message
    # The KV of the last token is never computed: one new token less fits exactly.
    granted = worker.allocate("s", range(5), max_new_tokens=12)
    assert not isinstance(granted, Refusal)


def test_no_blocks_says_what_is_needed_and_what_there_is() -> None:
    worker = Desk(num_blocks=9)
    worker.refill(1)
    worker.serve("cached", range(8))
    worker.grant("held", range(100, 112))
    refusal = item_refusal(worker, AllocateItem(key("s"), ROOT, token_bytes(range(200, 224))))
    assert refusal.reason is Reason.NO_BLOCKS
    words = ["needed 6 blocks", "2 free", "2 evictable", "of 8", "3 held", "1 reserved", "--num-blocks"]
    assert all(word in refusal.message for word in words), refusal.message


def test_the_first_item_without_blocks_ends_the_batch() -> None:
    """Smaller items after it are not tried, so that none is overtaken for ever. Living sequences still get their tables: a worker
    that lost the first answer learns what is held for it."""
    worker = Desk(num_blocks=4)
    living = worker.grant("a", range(8))
    items = worker.item("large", range(20, 28)), worker.item("small", [1]), worker.item("a", range(8))
    *others, again = worker.allocate_batch(*items)
    assert others == [Refused(Reason.NO_BLOCKS), Refused(Reason.NOT_TRIED)]
    assert isinstance(again, Granted)
    assert again == living
    refusal = worker.manager.allocate(worker.uplink(), items)[0][1]
    assert isinstance(refusal, Refusal)
    assert "ask again" in refusal.message


def started(limits: Limits = LIMITS) -> Desk:
    """A worker with sequence s: five tokens, two blocks, four tokens computed."""
    worker = Desk(17, 4, limits=limits)
    worker.grant("s", range(5))
    worker.report("s", 4)
    return worker


UPDATE = SequenceUpdate(key("s"), 5, token_bytes([5]), 5)


@pytest.mark.parametrize(
    ("update", "want_blocks", "reason", "position", "words"),
    [
        (UPDATE._replace(key=key("nobody")), 0, Reason.UNKNOWN_SEQUENCE, None, ["'nobody'", "Allocate it first"]),
        (UPDATE._replace(key=key("s", round=1)), 0, Reason.UNKNOWN_SEQUENCE, None, ["round 1"]),
        (UPDATE._replace(key=key("s", attempt=2)), 0, Reason.UNKNOWN_SEQUENCE, None, ["attempt 2"]),
        (UPDATE._replace(start=6), 0, Reason.GAP, 5, ["up to position 5", "begins at 6", "from 5 on"]),
        (UPDATE._replace(start=3, tokens=token_bytes([3, 9])), 0, Reason.TOKENS_DIFFER, 4, ["position 4"]),
        (UPDATE._replace(tokens=b"123"), 0, Reason.BAD_FIELD, None, ["uint32", "3 bytes"]),
        (UPDATE._replace(tokens=token_bytes(range(16))), 0, Reason.BAD_FIELD, None, ["at most 20", "21"]),
        (UPDATE._replace(num_computed_tokens=7), 0, Reason.BAD_FIELD, None, ["7 tokens", "6 are known", "8 slots"]),
        (
            UPDATE._replace(tokens=token_bytes(range(5)), num_computed_tokens=9),
            0,
            Reason.BAD_FIELD,
            None,
            ["9 tokens", "10 are known", "8 slots"],
        ),
        (UPDATE._replace(bound=((TableEntry(0, 1, 5),),)), 0, Reason.STALE_GENERATION, None, ["block 1", "entry 0"]),
        (
            UPDATE._replace(bound=((TableEntry(2, 9, 5),),)),
            0,
            Reason.STALE_GENERATION,
            None,
            ["block 9", "register again"],
        ),
        (UPDATE._replace(bound=((TableEntry(2, 99, 5),),)), 0, Reason.STALE_GENERATION, None, ["block 99"]),
        (UPDATE, 17, Reason.NEVER_FITS, None, ["17 blocks", "has 16", "--num-blocks"]),
    ],
)
def test_a_refused_append_says_why_and_where(
    update: SequenceUpdate, want_blocks: int, reason: Reason, position: int | None, words: list[str]
) -> None:
    refusal = item_refusal(started(), AppendItem(update, want_blocks))
    assert (refusal.reason, refusal.position) == (reason, position)
    assert all(word in refusal.message for word in words), refusal.message


def test_a_table_may_be_as_long_as_the_pool() -> None:
    """want_blocks equal to the capacity is all of it, and one more is NEVER_FITS."""
    worker = started()
    entries = worker.report("s", 5, want_blocks=16)
    assert len(worker.table("s")) == 16, entries


def test_a_second_stream_for_one_attempt_is_refused_elsewhere() -> None:
    worker = started()
    other = Desk(33, lockstep=worker.lockstep, worker_id="w2")
    (refusal,) = other.manager.allocate(other.uplink(), [GOOD])[0]
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.SEQUENCE_ELSEWHERE
    assert all(word in refusal.message for word in ("'w1'", "larger attempt"))


def test_max_downlink_entries_bounds_grants() -> None:
    """A worker that acknowledges nothing gets no third entry; after it has acknowledged, the reserve is filled."""
    worker = desk()
    for wish in (1, 2, 3, 4):
        worker.refill(wish)
    assert len(worker.session.downlink.pending()) == 2
    assert worker.counts.reserved == 2
    worker.lockstep.free(worker.uplink(downlink_ack=2))
    assert worker.counts.reserved == 4


def test_max_downlink_entries_bounds_stops() -> None:
    """A worker that acknowledges nothing is told of two stops; the third sequence is fenced all the same."""
    lockstep = Lockstep(limits=LIMITS)
    deaf, other = Desk(33, lockstep=lockstep, worker_id="deaf"), Desk(33, lockstep=lockstep, worker_id="other")
    for i in range(3):
        deaf.grant(f"s{i}", [i])
        other.grant(SequenceKey(f"s{i}", 2, 0), [i])
    assert len(deaf.session.downlink.pending()) == 2
    assert [deaf.report(f"s{i}", 1) for i in range(3)] == [Refused(Reason.STALE_ATTEMPT)] * 3


def test_foreign_returns_are_ignored() -> None:
    """A block that is not reserved here with that generation, the null block, and blocks beyond the pool are nobody's surplus."""
    worker = Desk(num_blocks=4)
    (held,) = worker.grant("s", range(8)).tables
    nonsense = [ReservedBlock(held.blocks[0], held.generations[0]), ReservedBlock(0, 0), ReservedBlock(99, 1)]
    worker.lockstep.free(worker.uplink(returned=nonsense))
    assert worker.counts.held == 2


def test_one_block_cannot_be_bound_twice_in_one_update() -> None:
    worker = started()
    (block,) = worker.refill(1)
    twice = (TableEntry(2, *block), TableEntry(3, *block))
    assert item_refusal(worker, AppendItem(UPDATE._replace(bound=(twice,)))).reason is Reason.STALE_GENERATION


def test_a_session_without_a_key_takes_none() -> None:
    """Of a caller in the same process; one that states a key means another session. Sessions with keys: test_edge_strangers.py."""
    worker = desk()
    with_key = Uplink(worker.number, 1, key=SessionKey(range(16)))
    assert refused(worker.manager.allocate, with_key, []).reason is Reason.WRONG_KEY
    worker.lockstep.allocate(Uplink(worker.number, 1))


def test_route_is_bounded_by_the_same_token_limit() -> None:
    worker = desk()
    for tokens in (b"", b"123", token_bytes(range(21))):
        refusal = refused(worker.manager.route, ROOT, tokens)
        assert (refusal.reason, refusal.field) == (Reason.BAD_FIELD, "tokens")
        assert "1 to 20" in refusal.message
        assert f"got {len(tokens)} bytes" in refusal.message


def test_an_unknown_worker_is_told_who_is_known() -> None:
    worker = desk()
    refusal = refused(worker.manager.describe_blocks, "w9")
    assert refusal.reason is Reason.UNKNOWN_WORKER
    assert "'w9'" in refusal.message
    assert "w1" in refusal.message


def test_a_page_of_the_block_map_is_bounded() -> None:
    """However much is asked for, one page and a few owners per block are answered."""
    worker = Desk(num_blocks=MAX_BLOCKS_PER_PAGE + 100, block_size=1)
    worker.serve("first", [1, 2])
    for i in range(MAX_OWNERS_PER_BLOCK + 5):
        worker.manager.allocate(worker.uplink(), [worker.item(f"s{i}", [1, 2])])
    page = worker.manager.describe_blocks("w1", 1, 10**9)
    assert len(page) == MAX_BLOCKS_PER_PAGE
    shared = next(block for block in page if block.ref_count > MAX_OWNERS_PER_BLOCK)
    assert len(shared.owners) == MAX_OWNERS_PER_BLOCK
    rest = worker.manager.describe_blocks("w1", MAX_BLOCKS_PER_PAGE + 1)
    assert [block.block for block in rest] == list(range(MAX_BLOCKS_PER_PAGE + 1, MAX_BLOCKS_PER_PAGE + 100))


# -- several groups


def test_the_refusal_names_the_group_that_is_short() -> None:
    worker = Desk(num_blocks=(9, 4))
    worker.grant("a", range(8))
    for num_tokens, words in (
        (8, "needed 2 blocks of group 1; worker 'w1' has 1 free and 0 evictable of 3"),
        (20, "the whole pool of group 1 of worker 'w1' has 3"),
    ):
        assert words in worker.refusal("b", range(50, 50 + num_tokens)).message


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
