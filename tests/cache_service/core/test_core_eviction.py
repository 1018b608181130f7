"""What stays, what goes, and in which order: the free list is the prefix cache."""

from __future__ import annotations

import pytest

from kvpool.cache_service.core.block_pool import State
from kvpool.cache_service.core.messages import SequenceUpdate, TableEntry
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import Lockstep, key, token_bytes
from tests.cache_service.core.model import Refused

pytestmark = pytest.mark.usefixtures("every_hash")

FIRST, SECOND = [1, 2, 3, 4], [5, 6, 7, 8]


def test_unsealed_blocks_are_granted_before_sealed_ones() -> None:
    """A freed block that nobody can hit goes to the head: it is used up before anything cached."""
    worker = Desk(num_blocks=6)
    worker.serve("cached", FIRST)
    worker.grant("unsealed", range(20, 26))
    tail = worker.table("unsealed")
    worker.free("unsealed")
    assert worker.free_list[:2] == tail
    worker.grant("other", range(30, 38))
    assert worker.counts.cached == 1


def test_a_hit_makes_a_prefix_young_again() -> None:
    """Least recently used: of two cached prefixes the one that was hit since outlives the other."""
    worker = Desk(num_blocks=5)
    worker.serve("old", [*FIRST, 0])
    worker.serve("new", [*SECOND, 0])
    worker.serve("old again", [*FIRST, 1])
    worker.grant("pressure", range(20, 32))
    worker.free("pressure")
    assert worker.grant("a", [*FIRST, 2]).num_cached_tokens == 4
    worker.free("a")
    assert worker.grant("b", [*SECOND, 2]).num_cached_tokens == 0


def test_a_duplicate_that_is_freed_is_emptied_at_once() -> None:
    """Two sequences computed the same block: the second copy serves nobody, so it is not kept when it is freed."""
    worker = Desk()
    for name in ("a", "b"):
        worker.grant(name, FIRST, no_wait=True)
        worker.report(name)
    duplicate = worker.table("b")[0]
    worker.free("b")
    assert worker.free_list[0] == duplicate
    assert worker.session.pools[0].state(duplicate) is State.FREE
    worker.free("a")
    assert worker.counts.cached == 1


def test_when_the_serving_copy_is_evicted_the_oldest_held_duplicate_takes_over() -> None:
    """A prefix stays a hit as long as any block of the pool holds it; the block that was sealed first comes next."""
    worker = Desk(num_blocks=5)
    for name in ("a", "b", "c"):
        worker.grant(name, FIRST, no_wait=True)
        worker.report(name)
    serving, oldest = worker.table("a")[0], worker.table("b")[0]
    worker.free("a")
    worker.grant("pressure", range(20, 28))
    assert serving in worker.table("pressure")
    worker.free("pressure")
    assert worker.grant("d", [*FIRST, 0]).blocks[0] == oldest


def test_a_child_is_no_hit_without_its_parent_and_again_with_it() -> None:
    """A hit is a path from the root without a hole; recomputing the parent makes its cached children reachable again."""
    worker = Desk(num_blocks=5)
    whole = Desk(lockstep=worker.lockstep, worker_id="whole")
    whole.serve("whole", [*FIRST, *SECOND])
    worker.grant("b", FIRST, no_wait=True)
    worker.report("b")
    worker.allocate("a", [*FIRST, *SECOND], no_wait=True, max_cached_tokens=0)
    worker.report("a")
    worker.free("b")
    worker.free("a")
    # The list runs: two free blocks, the first block of the prefix, the second. Three blocks take the first away.
    worker.grant("pressure", range(20, 31))
    assert worker.counts.cached == 1
    prompt = [*FIRST, *SECOND, 0]
    worker.lockstep.route(ROOT, token_bytes(prompt))
    worker.free("pressure")
    assert worker.grant("parent", [*FIRST, 9]).num_cached_tokens == 0
    worker.report("parent")
    worker.lockstep.route(ROOT, token_bytes(prompt))
    assert worker.grant("both", prompt).num_cached_tokens == 8


def test_a_prefix_that_one_worker_evicts_stays_a_hit_on_the_other() -> None:
    """The tree is one for all workers: a node lives while anybody has a copy, whoever had the first."""
    lockstep = Lockstep()
    one, two, three = (Desk(num_blocks=3, worker_id=f"w{i}", lockstep=lockstep) for i in range(3))
    for worker in (one, two, three):
        worker.serve(f"on {worker.worker_id}", [*FIRST, 0])
    for worker in (one, two):
        worker.serve(f"pressure on {worker.worker_id}", range(20, 28))
        assert worker.manager.num_prefix_nodes >= 1
    assert three.grant("again", [*FIRST, 1]).num_cached_tokens == 4
    one.serve("recomputed", [*FIRST, 1])
    assert one.grant("hit", [*FIRST, 2]).num_cached_tokens == 4


def test_free_gives_back_named_reserve_blocks_whatever_else_is_wrong() -> None:
    """Of a sequence that is unknown, superseded or told with a gap, the blocks bound out of the reserve come back all the same."""
    worker = Desk(num_blocks=9)
    one, two, three = worker.refill(3)
    worker.grant(key("s", round=1), FIRST)
    updates = (
        SequenceUpdate(key("nobody"), 7, b"", 0, ((TableEntry(5, *one),),)),
        SequenceUpdate(key("s", round=0), 0, b"", 0, ((TableEntry(1, *two),),)),
    )
    worker.lockstep.free(worker.uplink(downlink_ack=1, reserve_wish=0), *updates)
    assert worker.counts.reserved == 1
    assert len(worker.session.sequences) == 1, "a superseded round ends nothing"
    gap = SequenceUpdate(key("s", round=1), 99, b"", 99, ((TableEntry(1, *three),),))
    assert not isinstance(worker.lockstep.free(worker.uplink(), gap), Refused)
    assert (worker.counts.reserved, worker.counts.held) == (0, 0)
