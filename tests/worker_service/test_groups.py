"""A worker with several groups: a pool, a reserve and a table for each, and one text."""

from __future__ import annotations

import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from tests.lockstep import in_lockstep
from tests.until import until
from tests.worker_service.world import World, read_right

SIZES = [(40, 25), (25, 40), (30, 30, 26)]


@pytest.mark.parametrize("num_blocks", SIZES, ids=str)
async def test_texts_are_right_while_pools_of_different_size_are_short(num_blocks: tuple[int, ...]) -> None:
    """Prompts with shared beginnings, more of them than the smallest pool has room for: some are preempted."""
    world = World(num_blocks=num_blocks, block_size=4)
    async with world.running():
        prompts = [[*range(10), i, *range(i)] for i in range(10)]
        requests = [world.submit(prompt, 40) for prompt in prompts]
        async with in_lockstep(world.engine, len(requests)):
            await read_right(*requests)
        assert sum(request.num_preemptions for request in requests) > 0


@pytest.mark.parametrize("num_blocks", SIZES, ids=str)
async def test_the_cache_of_every_group_survives_a_restart_of_the_manager(num_blocks: tuple[int, ...]) -> None:
    """What was cached is a hit after it, in the same blocks, with the same order of eviction in each pool."""
    world = World(num_blocks=num_blocks, block_size=4)
    async with world.running():
        prompts = [[i] * 3 + list(range(9)) for i in range(3)]
        for prompt in [*prompts, prompts[1]]:
            await world.generate(prompt, 5)
        await world.until_idle()

        def cached() -> list[list[int]]:
            pools = world.manager.worker("w0").pools
            return [[block for block in pool.free_list() if pool.is_cached(block)] for pool in pools]

        before, old = cached(), world.manager
        assert all(before)
        world.wire.manager = CacheManager(old.epoch + 1, limits=old.limits)
        await until(lambda: world.manager.num_reports)
        await world.until_idle()
        assert cached() == before
        forwarded = world.model.num_forwarded
        await world.generate(prompts[0], 5)
        assert world.model.num_forwarded == forwarded + 12 - 8 + 4


async def test_a_restart_in_the_middle_costs_no_stream_and_no_token() -> None:
    world = World(num_blocks=(100, 90), block_size=4)
    world.model.step_seconds = 0.002
    async with world.running():
        prompts = [[i, *range(20 + i)] for i in range(4)]
        requests = [world.submit(prompt, 50) for prompt in prompts]
        await until(lambda: all(request.num_generated > 5 for request in requests))
        old = world.manager
        world.wire.manager = CacheManager(old.epoch + 1, limits=old.limits)
        await read_right(*requests)
        assert world.manager.epoch == 2
        assert sum(request.num_preemptions for request in requests) == 0
        assert world.model.num_forwarded == sum(len(prompt) + 49 for prompt in prompts)


async def test_what_the_smallest_pool_can_never_hold_is_refused_at_once() -> None:
    world = World(num_blocks=(100, 9), block_size=4)
    async with world.running():
        with pytest.raises(EngineError, match="this worker has 8") as refused:
            world.submit(list(range(20)), 20)
        assert refused.value.kind is ErrorKind.NEVER_FITS
