"""Mistakes that other systems have made, one test each. Every one of them must stay impossible here."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvpool.cache_service.core.block_pool import BlockPool
from kvpool.cache_service.core.budget import Account, Budget
from kvpool.cache_service.core.hashing import xxh64
from kvpool.cache_service.core.manager import SWEEP_SLICE_NODES, CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    AppendItem,
    Granted,
    Root,
    SequenceUpdate,
    Uplink,
    WorkerLoad,
)
from kvpool.cache_service.core.prefix_tree import Node, PrefixTree
from kvpool.cache_service.core.refusal import Reason, Refusal
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import (
    FINGERPRINT,
    key,
    registration,
    token_bytes,
)
from tests.cache_service.core.model import Refused

pytestmark = pytest.mark.usefixtures("every_hash")


def lines_of(operation: Callable[[], object]) -> int:
    """Lines of Python that an operation executes inside the core: its work without a clock."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if "cache_service" not in frame.f_code.co_filename or "tests" in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(before)
    return count


def test_the_tenant_salt_separates_on_every_path() -> None:
    """Tenant salt dropped on a second code path: Allocate, waiting, Route and the answer to a retry all keep tenants apart."""
    worker = Desk()
    mine, theirs = Root(FINGERPRINT, tenant_salt="mine"), Root(FINGERPRINT, tenant_salt="theirs")
    prompt = list(range(9))
    worker.grant("mine", prompt, root=mine)
    assert isinstance(worker.allocate("theirs", prompt, root=theirs), Granted), "no wait for another tenant's prefix"
    worker.report("mine")
    worker.free("theirs")
    assert worker.grant("theirs again", prompt, root=theirs).num_cached_tokens == 0
    worker.lockstep.route(theirs, token_bytes(prompt))
    routed = worker.manager.route(Root("", tenant_salt="mine"), token_bytes(prompt))
    assert routed[0].num_cached_tokens == 8
    # A live sequence is handed out again only under its own root.
    assert worker.allocate("mine", prompt, root=theirs) == Refused(Reason.TOKENS_DIFFER, 0)
    assert worker.allocate("mine", prompt, root=mine) == worker.allocate("mine", prompt, root=mine)


@pytest.mark.parametrize("position", ["head", "middle", "tail"])
def test_a_hit_on_the_free_list_costs_the_same_anywhere(position: str) -> None:
    """`deque.remove` on the free list, O(n) per hit: pinning touches two neighbours, however long the list is."""
    costs = []
    for num_blocks in (64, 4096):
        tree = PrefixTree(xxh64)
        pool = BlockPool(num_blocks, tree, tree.new_holder(), 0, Account(Budget(1 << 26, 1 << 30), 4))
        root = tree.intern_root(ROOT, 4)
        for i in range(1, num_blocks):
            (block,) = pool.take_held(1, i)
            path: list[Node] = []
            tree.extend(path, root, i.to_bytes(16, "little"), 4, 1)
            tree.name(path[0])
            pool.seal(block, path[0])
        for block in range(1, num_blocks):
            pool.release(block)
        before = list(pool.free_list())
        index = {"head": 0, "middle": num_blocks // 2, "tail": num_blocks - 2}[position]
        costs.append(lines_of(lambda: pool.pin(before[index])))  # noqa: B023
        assert list(pool.free_list()) == before[:index] + before[index + 1 :]
    assert costs[0] == costs[1] < 20


def test_retiring_a_session_costs_the_same_however_much_it_holds() -> None:
    """O(all blocks) sweep on one expiry stalls every RPC: fencing is O(1)."""
    costs = []
    for num_sequences in (1, 200):
        manager = CacheManager(1)
        session = manager.register(registration(num_blocks=20 * num_sequences + 1), 0.0).session
        items = [
            AllocateItem(key(f"s{i}"), ROOT, token_bytes(range(i * 100, i * 100 + 76))) for i in range(num_sequences)
        ]
        manager.allocate(Uplink(session, 1), items)
        manager.free(Uplink(session, 2), [SequenceUpdate(item.key, 0, b"", 76) for item in items[::2]])
        costs.append(lines_of(lambda: manager.deregister(session)))  # noqa: B023
        assert manager.check().violations == []
    assert costs[0] == costs[1] < 80


def test_a_slice_of_the_sweep_is_bounded_also_where_long_chains_end_together() -> None:
    """The last leaf of a chain prunes all of it: a slice counts what it prunes, and stops at most one chain too late."""
    depth, num_chains = 80, 80
    manager = CacheManager(1)
    num_blocks = (depth + 1) * num_chains
    session = manager.register(registration(num_blocks=num_blocks, block_size=1), 0.0).session
    # Granting in turns puts the last blocks of all chains side by side at the end of the pool.
    keys = [key(f"s{i}") for i in range(num_chains)]
    manager.allocate(Uplink(session, 1), [AllocateItem(k, ROOT, token_bytes([i])) for i, k in enumerate(keys)])
    for length in range(1, depth):
        updates = [SequenceUpdate(k, length, token_bytes([i]), length) for i, k in enumerate(keys)]
        manager.append(Uplink(session, 1 + length), [AppendItem(update, length + 1) for update in updates])
    manager.free(Uplink(session, 1 + depth), [SequenceUpdate(k, depth, b"", depth) for k in keys])
    assert manager.num_prefix_nodes == depth * num_chains
    manager.deregister(session)
    while manager.num_prefix_nodes:
        before = manager.num_prefix_nodes
        assert lines_of(manager.sweep) < 40 * (SWEEP_SLICE_NODES + depth)
        assert before - manager.num_prefix_nodes <= SWEEP_SLICE_NODES + depth
        assert manager.check().violations == []
    while manager.sweep():
        pass


def test_a_slice_of_the_sweep_ends_a_bounded_number_of_sequences() -> None:
    """Sequences that are still computing when their session ends are dropped in slices too, by the length of their paths."""
    length, num_sequences = 64, 100
    manager = CacheManager(1)
    session = manager.register(registration(num_blocks=length * num_sequences + 1, block_size=1), 0.0).session
    prompts = [token_bytes([i, *range(length - 1)]) for i in range(num_sequences)]
    manager.allocate(Uplink(session, 1), [AllocateItem(key(f"s{i}"), ROOT, p) for i, p in enumerate(prompts)])
    manager.deregister(session)
    while manager.num_prefix_nodes:
        before = manager.num_prefix_nodes
        manager.sweep()
        assert before - manager.num_prefix_nodes <= SWEEP_SLICE_NODES + length
        assert manager.check().violations == []


def test_the_collector_finds_nothing() -> None:
    """The process runs without the cyclic collector: a busy life, refusals and the end of a session included, leaves no cycle."""
    manager = CacheManager(1)
    gc.collect()
    gc.disable()
    try:
        for life in range(1, 4):
            manager.deregister(_live_a_life(manager, life))
        while manager.sweep():
            pass
        assert gc.collect() == 0
        assert manager.num_prefix_nodes == 0
    finally:
        gc.enable()


def _live_a_life(manager: CacheManager, life: int) -> int:
    """Hits, waits, refusals, duplicates, evictions, and sequences that still live at the end."""
    introduction = registration(incarnation=life, num_blocks=9, block_size=2)
    session = manager.register(introduction, 0.0).session
    call_no = 0
    for turn in range(20):
        for tokens in ([1, 2, 3, 4, turn], [1, 2, turn, turn, turn, turn, 7], list(range(12)), list(range(50))):
            call_no += 2
            keys = [key(f"{turn}-{i}") for i in range(3)]
            items = [AllocateItem(k, ROOT, token_bytes(tokens), no_wait=bool(turn % 2)) for k in keys]
            manager.allocate(Uplink(session, call_no, reserve_wishes=(turn % 3,)), items)
            leaving = [SequenceUpdate(k, 0, b"", len(tokens)) for k in keys[turn % 4 == 3 :]]
            manager.append(Uplink(session, call_no + 1), [AppendItem(update) for update in leaving])
            call_no += 1
            told = manager.worker("w1").downlink.last_number
            manager.free(Uplink(session, call_no + 1, downlink_ack=told if turn else 0), leaving)
            manager.keep_alive(session, told if turn else 0, WorkerLoad(), 0.0)
            manager.route(ROOT, token_bytes(tokens))
            manager.describe_blocks("w1")
        with pytest.raises(Refusal):
            manager.allocate(Uplink(session, 1), [])
    return session
