"""A request can end at any point of its life, and leaves nothing behind: `running()` asserts that no block stays held."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool.worker_service.cache.sequence import SequenceState as State
from kvpool.worker_service.engine.request import Request
from tests.tracer import expected_text
from tests.until import until
from tests.worker_service.world import World, read, read_right

PROMPT = list(range(40))

POINTS: dict[str, Callable[[Request], bool]] = {
    "waiting": lambda r: r.sequence.state is State.WAITING and not r.sequence.maybe_granted,
    "waiting for a prefix in flight": lambda r: r.sequence.state is State.PARKED,
    "being allocated": lambda r: r.sequence.state is State.ALLOCATING,
    "granted while a step runs": lambda r: r.sequence.state is State.LIVE and not r.has_begun,
    "prefilling, in a step": lambda r: r.sequence.in_step and not r.num_generated,
    "prefilling, between two chunks": lambda r: (
        r.sequence.state is State.LIVE and not r.sequence.in_step and 0 < r.sequence.num_computed_tokens < len(PROMPT)
    ),
    "decoding, in a step": lambda r: r.sequence.in_step and r.num_generated > 2,
    "preempted": lambda r: r.num_preemptions > 0 and r.sequence.state is State.WAITING,
    "preempted, in the next round": lambda r: r.num_preemptions > 0 and r.sequence.state is State.LIVE,
    "ended": lambda r: r.finish_reason is not None,
}


@pytest.mark.parametrize("point", POINTS)
async def test_a_request_can_end_at_any_point(point: str) -> None:
    """Nothing more comes for it, the others' texts are right, and its name is free."""
    world = World(num_blocks=27, block_size=4, max_num_seqs=3, max_num_batched_tokens=16, max_mixed_prefill_tokens=5)
    world.model.step_seconds = 0.001
    async with world.running():
        is_reached = POINTS[point]
        # The same prompt waits for its prefix in flight; others have one of their own, and another tenant.
        shift = 0 if point == "waiting for a prefix in flight" else 100
        others = [world.submit([i + shift * (i > 0), *PROMPT[1:]], 20, tenant="a") for i in (0, 1)]
        request = world.submit([shift, *PROMPT[1:]], 20, tenant="b", sequence_id="x")
        await until(lambda: is_reached(request), pause=0)
        before = request.num_generated
        world.engine.abort(request)
        world.engine.abort(request)
        again = world.submit([7, *PROMPT], 3, sequence_id="x")
        world.engine.abort(request)
        assert await read(again) == expected_text([7, *PROMPT], 3)
        await read_right(*others)
        assert request.num_generated == before
        assert request not in list(world.engine.scheduler)
