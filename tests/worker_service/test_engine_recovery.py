"""The manager goes and comes back, or forgets the worker: nothing that the worker holds is lost, and no text changes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import TOKEN_BYTES
from kvpool.worker_service.engine.errors import ErrorKind
from tests.tracer import expected_text
from tests.until import until
from tests.worker_service.world import World, failed, read, read_right

pytestmark = pytest.mark.usefixtures("brief_backoff")


def restart(world: World) -> None:
    """The manager dies with all it knows; another one stands in its place."""
    old = world.manager
    world.wire.manager = CacheManager(old.epoch + 1, limits=old.limits)


async def test_a_restart_of_the_manager_costs_no_stream_and_no_token() -> None:
    """In the middle of four streams: each ends with its text, and no token is computed twice."""
    world = World(num_blocks=100, block_size=4)
    gate = world.model.gate = threading.Event()
    async with world.running():
        prompts = [[i, *range(20 + i)] for i in range(4)]
        requests = [world.submit(prompt, 50) for prompt in prompts]
        await until(lambda: any(request.sequence.in_step for request in requests))
        restart(world)
        gate.set()
        await read_right(*requests)
        assert world.manager.epoch == 2
        assert world.model.num_forwarded == sum(len(prompt) + 49 for prompt in prompts)
        assert sum(request.num_preemptions for request in requests) == 0


async def test_the_cache_survives_a_restart_of_the_manager() -> None:
    """Nothing runs: what was cached before is a hit after, in the same blocks, with the same order of eviction."""
    world = World(num_blocks=60, block_size=4)
    async with world.running():
        prompts = [[i] * 3 + list(range(21)) for i in range(4)]
        for prompt in [*prompts, prompts[1]]:
            await world.generate(prompt, 5)
        await world.until_idle()
        pool = world.manager.worker("w0").pools[0]
        before = [block for block in pool.free_list() if pool.is_cached(block)]
        restart(world)
        await until(lambda: world.manager.num_reports)
        pool = world.manager.worker("w0").pools[0]
        assert [block for block in pool.free_list() if pool.is_cached(block)] == before
        forwarded = world.model.num_forwarded
        for prompt in prompts:
            request = world.submit(prompt, 5)
            assert await read(request) == expected_text(prompt, 5)
            assert request.num_cached_tokens == 20
        assert world.model.num_forwarded - forwarded == 4 * (24 - 20 + 4)


async def test_while_the_manager_is_away_decoding_goes_on_from_the_reserve() -> None:
    """Then it pauses, and goes on when the manager is back; nothing is computed twice."""
    world = World(num_blocks=200, block_size=4, reserve_seconds=0.1)
    world.model.step_seconds = 0.003
    async with world.running():
        prompts = [[i, *range(10)] for i in range(3)]
        requests = [world.submit(prompt, 80) for prompt in prompts]
        await until(lambda: all(request.num_generated > 2 for request in requests))
        await until(lambda: world.cache.num_spare_blocks[0] > 6)
        world.wire.is_cut = True
        generated = sum(request.num_generated for request in requests)
        await until(lambda: world.cache.num_spare_blocks[0] == 0)
        await asyncio.sleep(0.05)
        assert sum(request.num_generated for request in requests) > generated + 6
        assert not any(request.stream.is_finished for request in requests)
        world.wire.is_cut = False
        restart(world)
        await read_right(*requests)
        assert world.model.num_forwarded == sum(len(prompt) + 79 for prompt in prompts)


async def test_a_worker_whose_report_is_refused_forgets_everything_and_serves_again() -> None:
    """A defect, here a cached content that was spoilt; the worker serves already when it comes. Its streams end with UNAVAILABLE,
    the next request has its text."""
    world = World(num_blocks=60, block_size=4)
    world.model.step_seconds = 0.003
    async with world.running():
        await world.generate([7] * 9, 4)
        request = world.submit(list(range(20)), 200)
        await until(lambda: request.num_generated > 8)
        ledger = world.cache.state.ledgers[0]
        content = ledger.content(ledger.idle_blocks()[0])
        assert content is not None
        content.tokens = bytes(3 * TOKEN_BYTES)
        restart(world)
        assert (await failed(request)).error.kind is ErrorKind.UNAVAILABLE
        await until(world.cache.is_ready)
        assert await world.generate(list(range(20)), 8) == expected_text(list(range(20)), 8)
        assert world.manager.worker("w0").num_cached_tokens == 0


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_was_held_at_register_and_is_gone_since_is_reported_as_nothing(when: str) -> None:
    """A request that filled no block ends while the session is lost: the manager waits for a report all the same."""
    world = World(num_blocks=60, block_size=16)
    gate = world.model.gate = threading.Event()
    async with world.running():
        request = world.submit([1, 2, 3], 1)
        await until(lambda: request.sequence.in_step)
        world.wire.gate = asyncio.Event()
        restart(world)
        if when == "after":
            await until(lambda: world.manager.sessions)
        gate.set()
        assert await read(request) == expected_text([1, 2, 3], 1)
        world.wire.gate.set()
        world.wire.gate = None
        await until(lambda: world.manager.sessions and world.is_open.is_set())
        assert await world.generate([4, 5, 6], 3) == expected_text([4, 5, 6], 3)


async def test_a_report_that_is_refused_for_whatever_reason_is_not_repeated_for_ever() -> None:
    """A defect of the manager, answered INTERNAL: the worker gives its blocks up, and serves."""
    world = World(num_blocks=60, block_size=4)
    async with world.running():
        await world.generate(list(range(20)), 4)
        restart(world)
        world.wire.break_reports = True
        await until(lambda: not world.cache.state.holds_anything)
        await until(world.is_open.is_set)
        assert await world.generate(list(range(20)), 4) == expected_text(list(range(20)), 4)
        assert world.wire.num_calls["Report"] == 1
