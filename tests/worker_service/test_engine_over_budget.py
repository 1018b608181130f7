"""A worker whose pool is larger than what the manager may keep: requests wait or are preempted, all come to their end."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import Limits
from tests.tracer import expected_text
from tests.worker_service.world import Wire, World, read


@pytest.mark.parametrize("limits", [Limits(max_total_blocks=12), Limits(max_total_tokens=48)], ids=["blocks", "tokens"])
async def test_every_request_comes_to_its_end_under_a_small_budget(limits: Limits) -> None:
    """A pool of 500 blocks of which 12 can be granted: the worker takes it for a pool of 12."""
    rng = random.Random(5)
    world = World(num_blocks=500, block_size=4, wire=Wire(CacheManager(1, limits=limits)))
    async with world.running():
        prompts = [[rng.randrange(50) for _ in range(rng.randrange(1, 20))] for _ in range(12)]
        requests = [world.submit(prompt, 20) for prompt in prompts]
        async with asyncio.timeout(30):
            for prompt, request in zip(prompts, requests, strict=True):
                assert await read(request) == expected_text(prompt, 20)
        budget = world.manager.budget
        assert budget.num_blocks <= 12
        assert world.manager.worker("w0").pools[0].num_withheld == 499 - budget.num_blocks
        assert world.link.num_sessions == 1


async def test_a_report_beyond_the_budget_ends_what_runs_and_the_worker_serves_again() -> None:
    """A manager that comes back with a smaller budget: nothing is wedged."""
    world = World(num_blocks=100, block_size=4)
    async with world.running():
        for i in range(6):
            assert await world.generate([i] * 20, 3) == expected_text([i] * 20, 3)
        old = world.wire.manager
        world.wire.manager = CacheManager(old.epoch + 1, limits=Limits(max_total_blocks=8))
        async with asyncio.timeout(30):
            while not (world.cache.is_ready() and world.is_known()):
                world.engine.changed_for_link.set()
                await asyncio.sleep(0.005)
        assert world.manager.budget.num_blocks == 0
        assert await world.generate([1] * 20, 3) == expected_text([1] * 20, 3)
