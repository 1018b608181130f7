"""Explain: each cause made on purpose. It looks, it changes nothing, and what it promises Allocate serves."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from kvpool.cache_service.core.evictions import EvictionMemory
from kvpool.cache_service.core.explanation import SessionExplanation
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import AllocateItem, BlockMissCause, Root, SequenceUpdate, Uplink, WorkerLoad
from kvpool.cache_service.core.refusal import Reason
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import FINGERPRINT, Lockstep, key, refused, registration, snapshot, token_bytes

PROMPT = list(range(100, 110))
"""Two blocks of four and a tail."""


def explained(desk: Desk, tokens: list[int], root: Root = ROOT) -> SessionExplanation:
    """One worker's part in the explanation, which changes nothing."""
    before = snapshot(desk.manager)
    (found,) = desk.manager.explain(root, token_bytes(tokens), desk.worker_id).workers
    assert snapshot(desk.manager) == before
    return found


def cause(desk: Desk, tokens: list[int], root: Root = ROOT) -> tuple[int, BlockMissCause]:
    """Where the prompt misses first, and why."""
    found = explained(desk, tokens, root)
    assert found.miss.position == found.num_cached_tokens
    return found.miss.position, found.miss.cause


def test_a_prompt_that_nobody_has_sent_was_never_seen() -> None:
    desk = Desk()
    assert cause(desk, PROMPT) == (0, BlockMissCause.NEVER_SEEN)
    desk.serve("a", [*PROMPT[:4], 1, 2, 3, 4, 5])
    assert cause(desk, PROMPT) == (4, BlockMissCause.NEVER_SEEN)


def test_the_rest_that_fills_no_block_is_a_partial_tail() -> None:
    desk = Desk()
    desk.serve("a", PROMPT)
    assert cause(desk, PROMPT) == (8, BlockMissCause.PARTIAL_TAIL)
    assert cause(desk, PROMPT[:3]) == (0, BlockMissCause.PARTIAL_TAIL)


def test_the_last_token_is_always_computed_and_its_block_with_it() -> None:
    desk = Desk()
    desk.serve("a", PROMPT)
    assert cause(desk, PROMPT[:8]) == (4, BlockMissCause.LAST_TOKEN)
    assert desk.serve("b", PROMPT[:8]) == 4
    assert cause(desk, PROMPT[:4]) == (0, BlockMissCause.LAST_TOKEN)


def test_what_a_sequence_computes_now_is_said_with_its_name_and_reach() -> None:
    """As Allocate says it."""
    desk = Desk()
    desk.grant("a", PROMPT)
    found = explained(desk, [*PROMPT, 1, 2, 3])
    assert (found.num_cached_tokens, found.miss.cause) == (0, BlockMissCause.BEING_COMPUTED)
    assert found.miss.leader == desk.allocate("b", [*PROMPT, 1, 2, 3]) == (key("a"), 8)
    desk.report("a", 4)
    assert cause(desk, PROMPT) == (4, BlockMissCause.BEING_COMPUTED)
    desk.free("a", 4)
    assert cause(desk, PROMPT) == (4, BlockMissCause.NEVER_SEEN)


def _full_pool(lockstep: Lockstep | None = None) -> Desk:
    """A pool of four blocks, full of PROMPT's two, and two that are older."""
    desk = Desk(num_blocks=5, lockstep=lockstep)
    desk.serve("old", [1, 2, 3, 4, 5, 6, 7, 8])
    desk.serve("new", PROMPT[:8])
    return desk


def test_an_evicted_prefix_is_remembered_with_the_time_and_the_sequence_that_needed_it() -> None:
    lockstep = Lockstep()
    desk = _full_pool(lockstep)
    lockstep.now += 3.0
    lockstep.tick()
    desk.serve("reason", [*range(50, 63)])
    found = explained(desk, PROMPT)
    assert (found.num_cached_tokens, found.miss.cause) == (0, BlockMissCause.EVICTED)
    assert found.miss.evicted is not None
    assert (found.miss.evicted.at, found.miss.evicted.key) == (lockstep.now, key("reason"))
    assert cause(desk, [1, 2, 3, 4, 5]) == (0, BlockMissCause.EVICTED)
    assert cause(desk, [1, 2, 3, 5, 5]) == (0, BlockMissCause.NEVER_SEEN)


@pytest.mark.parametrize("evictor", [None, "long"], ids=["a reserve", "a longer table"])
def test_a_reserve_evicts_for_nobody_and_a_longer_table_for_its_sequence(evictor: str | None) -> None:
    desk = _full_pool()
    if evictor is None:
        desk.refill(4)
    else:
        desk.grant(evictor, [*range(50, 54)])
        desk.report(evictor, want_blocks=4)
    evicted = explained(desk, PROMPT).miss.evicted
    assert evicted is not None
    assert evicted.key == (evictor and key(evictor))


def test_a_heartbeat_says_what_the_time_is() -> None:
    """A manager whose workers are alive is never more than that out of date, whatever its ticks do."""
    lockstep = Lockstep()
    desk = _full_pool(lockstep)
    lockstep.now += 2.0
    desk.manager.keep_alive(desk.number, 0, WorkerLoad(), lockstep.now)
    desk.manager.allocate(desk.uplink(), [desk.item("reason", [*range(50, 63)])])
    (found,) = desk.manager.explain(ROOT, token_bytes(PROMPT)).workers
    assert found.miss.evicted is not None
    assert found.miss.evicted.at == lockstep.now


def test_what_is_cached_again_is_served_and_its_eviction_is_history() -> None:
    desk = _full_pool()
    desk.serve("reason", [*range(50, 63)])
    desk.serve("again", PROMPT)
    assert cause(desk, PROMPT) == (8, BlockMissCause.PARTIAL_TAIL)


def test_a_block_whose_content_another_block_still_serves_was_not_evicted() -> None:
    """Two sequences computed the same; the block that served the hits is evicted, the other takes over."""
    desk = Desk(num_blocks=5)
    desk.grant("a", PROMPT[:5])
    desk.grant("b", PROMPT[:5], no_wait=True)
    desk.report("a", 4)
    desk.report("b", 4)
    desk.free("a", 4)
    desk.grant("c", [1, 2, 3, 4, 5, 6])
    assert desk.manager._evictions is not None
    assert len(desk.manager._evictions) == 0
    assert cause(desk, PROMPT[:5]) == (4, BlockMissCause.PARTIAL_TAIL)


def test_without_a_memory_an_evicted_prefix_was_never_seen() -> None:
    manager = CacheManager(1)
    number = manager.register(registration(num_blocks=3), 0.0).session
    _serve(manager, number, ROOT, PROMPT[:5])
    assert manager.explain(ROOT, token_bytes(PROMPT[:5])).workers[0].num_cached_tokens == 4
    _serve(manager, number, ROOT, [1, 2, 3, 4, 5], call_no=3)
    (found,) = manager.explain(ROOT, token_bytes(PROMPT[:5])).workers
    assert (found.num_cached_tokens, found.miss.cause) == (0, BlockMissCause.NEVER_SEEN)


def test_the_memory_is_bounded_and_keeps_the_latest() -> None:
    desk = Desk(num_blocks=2)
    for first in range(200):
        desk.serve(str(first), [first, 0, 0, 0])
    assert desk.manager._evictions is not None
    assert len(desk.manager._evictions) <= 64
    remembered = [cause(desk, [first, 0, 0, 0, 0])[1] is BlockMissCause.EVICTED for first in range(199)]
    assert remembered == [False] * (199 - sum(remembered)) + [True] * sum(remembered)
    assert sum(remembered) >= 48


def _evict(memory: EvictionMemory, name: int, sequence_id: str) -> None:
    memory.begin(1, key(sequence_id), ROOT)
    memory.names.append(name)


@pytest.mark.parametrize("num_between", [0, 20])
def test_of_several_evictions_of_a_content_the_latest_is_named(num_between: int) -> None:
    """Those in one segment of the memory, and those in different ones, all of them older than the newest."""
    memory = EvictionMemory(64)
    for sequence_id in ("first", "second", "third"):
        _evict(memory, 7, sequence_id)
        for other in range(num_between):
            _evict(memory, 1000 + other, "another")
    assert memory.find(7)[1].key == key("third")


def test_evictions_side_by_side_keep_their_own_sequences_and_times() -> None:
    """Ids of letters that take several bytes; what happened before a tick did not happen after it."""
    memory = EvictionMemory(64)
    for name, (sequence_id, time) in enumerate([("élève", 1.0), ("日本", 2.0), ("z", 3.0)]):
        memory.set_time(time)
        _evict(memory, name, sequence_id)
    memory.set_time(4.0)
    found = [memory.find(name)[1] for name in range(3)]
    assert [(one.key, one.at) for one in found] == [(key("élève"), 1.0), (key("日本"), 2.0), (key("z"), 3.0)]


def test_bytes_of_two_names_are_no_name() -> None:
    """Names are looked for among bytes: what begins in the middle of one is none, and hides none that begins before it."""
    memory = EvictionMemory(64)
    ones = 0x0101010101010101
    _evict(memory, ones, "real")
    _evict(memory, 1, "next")  # its bytes begin, or end, with another 1
    _evict(memory, 0x0101010101010100, "last")
    assert memory.find(ones)[1].key == key("real")
    halves = array("Q", b"\0\0\0\0abcd" + b"efgh\0\0\0\0")
    for half in halves:
        _evict(memory, half, "half")
    (across,) = array("Q", b"abcdefgh")
    assert memory.find(across) == {}


def test_another_worker_that_has_the_prefix_is_named() -> None:
    """And also where this one has evicted it."""
    lockstep = Lockstep()
    first = _full_pool(lockstep)
    second = Desk(worker_id="w2", lockstep=lockstep)
    found = explained(second, PROMPT)
    assert (found.num_cached_tokens, found.miss.cause) == (0, BlockMissCause.ON_ANOTHER_WORKER)
    assert found.miss.other_worker is first.session
    second.serve("b", PROMPT)
    first.serve("reason", [*range(50, 63)])
    found = explained(first, PROMPT)
    assert (found.miss.cause, found.miss.other_worker) == (BlockMissCause.EVICTED, second.session)


def test_a_worker_that_has_left_has_nothing() -> None:
    lockstep = Lockstep()
    first = Desk(lockstep=lockstep)
    second = Desk(worker_id="w2", lockstep=lockstep)
    first.serve("a", PROMPT)
    lockstep.deregister(first.number)
    assert cause(second, PROMPT) == (0, BlockMissCause.NEVER_SEEN)


def test_a_sequence_of_another_worker_that_computes_the_prefix_is_named() -> None:
    lockstep = Lockstep()
    first = Desk(lockstep=lockstep)
    second = Desk(worker_id="w2", lockstep=lockstep)
    first.grant("a", PROMPT)
    found = explained(second, PROMPT)
    assert found.miss.cause is BlockMissCause.BEING_COMPUTED
    assert (found.miss.leader, found.miss.other_worker) == ((key("a"), 8), first.session)


@pytest.mark.parametrize(
    "root",
    [
        Root(FINGERPRINT, adapter="law"),
        Root(FINGERPRINT, input_digest=bytes(32)),
    ],
)
def test_another_root_that_has_the_tokens_is_named(root: Root) -> None:
    desk = Desk()
    desk.serve("a", PROMPT, root=root)
    miss = explained(desk, PROMPT).miss
    assert miss.cause is BlockMissCause.OTHER_ROOT
    assert miss.other_root is not None
    assert (miss.other_root.root, miss.other_root.block_size) == (root, 4)
    assert (miss.other_worker, miss.other_root.is_other_salt) == (desk.session, False)
    assert cause(desk, [*PROMPT[:3], 1, *PROMPT[4:]]) == (0, BlockMissCause.NEVER_SEEN)


def test_another_model_that_has_the_tokens_is_named() -> None:
    lockstep = Lockstep()
    desk = Desk(lockstep=lockstep)
    manager = desk.manager
    other = registration("w2")._replace(model_fingerprint="model-b")
    number = manager.register(other, 0.0).session
    _serve(manager, number, Root("model-b"))
    (found,) = manager.explain(ROOT, token_bytes(PROMPT)).workers
    assert found.session.worker_id == "w1"
    assert found.miss.other_root is not None
    assert found.miss.other_root.root == Root("model-b")


def test_another_block_size_that_has_the_tokens_is_named() -> None:
    lockstep = Lockstep()
    small, large = Desk(lockstep=lockstep), Desk(worker_id="w2", block_size=8, lockstep=lockstep)
    large.serve("a", PROMPT)
    miss = explained(small, PROMPT).miss
    assert miss.cause is BlockMissCause.OTHER_ROOT
    assert miss.other_root is not None
    assert (miss.other_root.root, miss.other_root.block_size) == (ROOT, 8)
    assert cause(large, PROMPT) == (8, BlockMissCause.PARTIAL_TAIL)


def _serve(manager: CacheManager, session: int, root: Root, tokens: list[int] = PROMPT, call_no: int = 1) -> None:
    """A whole request in two calls."""
    manager.allocate(Uplink(session, call_no), [AllocateItem(key("other"), root, token_bytes(tokens))])
    manager.free(Uplink(session, call_no + 1), [SequenceUpdate(key("other"), 0, b"", len(tokens), ())])


def test_the_workers_come_in_the_order_of_what_they_serve() -> None:
    lockstep = Lockstep()
    desks = [Desk(worker_id=f"w{index}", lockstep=lockstep) for index in range(3)]
    desks[1].serve("a", PROMPT)
    desks[2].serve("b", PROMPT[:5])
    found = lockstep.manager.explain(ROOT, token_bytes(PROMPT))
    assert [(one.session.worker_id, one.num_cached_tokens) for one in found.workers] == [
        ("w1", 8),
        ("w2", 4),
        ("w0", 0),
    ]
    assert found.num_workers == 3


def test_a_worker_that_takes_no_prompts_is_explained_only_by_name() -> None:
    desk = Desk()
    desk.manager.drain("w1")
    assert desk.manager.explain(ROOT, token_bytes(PROMPT)).workers == []
    assert desk.manager.explain(ROOT, token_bytes(PROMPT), "w1").num_workers == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((ROOT, b""), Reason.BAD_FIELD),
        ((ROOT, b"abc"), Reason.BAD_FIELD),
        ((ROOT, token_bytes(PROMPT), "nobody"), Reason.UNKNOWN_WORKER),
        ((Root("model-b"), token_bytes(PROMPT), "w1"), Reason.BAD_FIELD),
    ],
)
def test_what_cannot_be_explained_is_refused(arguments: Any, reason: Reason) -> None:
    assert refused(Desk().manager.explain, *arguments).reason is reason


def test_a_worker_that_still_reports_is_not_explained() -> None:
    manager = CacheManager(1)
    manager.register(registration()._replace(holds_state=True), 0.0)
    assert refused(manager.explain, ROOT, token_bytes(PROMPT), "w1").reason is Reason.RECOVERING
    assert manager.explain(ROOT, token_bytes(PROMPT)).workers == []
