"""What stays, what goes, and in which order: the free list is the prefix cache."""

from __future__ import annotations

import pytest

from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import token_bytes

pytestmark = pytest.mark.usefixtures("every_hash")

FIRST, SECOND = [1, 2, 3, 4], [5, 6, 7, 8]


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
