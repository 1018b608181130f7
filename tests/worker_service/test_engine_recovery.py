"""The manager goes and comes back, or forgets the worker: nothing that the worker holds is lost, no text changes, and decoding goes
on from the reserve."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import TOKEN_BYTES, Limits
from kvpool.worker_service.cache.reserve import DecodingRate, spare_target
from kvpool.worker_service.engine.errors import ErrorKind
from tests.until import until
from tests.worker_service.world import World, failed, read_right

pytestmark = pytest.mark.usefixtures("brief_backoff")


def restart(world: World) -> None:
    """The manager dies with all it knows; another one stands in its place."""
    old = world.manager
    world.wire.manager = CacheManager(old.epoch + 1, limits=old.limits)


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
        await world.answered([7] * 9, 4)
        request = world.submit(list(range(20)), 200)
        await until(lambda: request.num_generated > 8)
        ledger = world.cache.state.ledgers[0]
        content = ledger.content(ledger.idle_blocks()[0])
        assert content is not None
        content.tokens = bytes(3 * TOKEN_BYTES)
        restart(world)
        assert (await failed(request)).error.kind is ErrorKind.UNAVAILABLE
        await until(world.cache.is_ready)
        await world.answered(list(range(20)), 8)
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
        await read_right(request)
        world.wire.gate.set()
        world.wire.gate = None
        await until(lambda: world.manager.sessions and world.is_open.is_set())
        await world.answered([4, 5, 6], 3)


@pytest.mark.parametrize("limits", [Limits(), Limits(max_total_blocks=8)], ids=["a defect", "a smaller budget"])
async def test_a_report_that_is_refused_for_whatever_reason_is_not_repeated_for_ever(limits: Limits) -> None:
    """A defect of the manager is answered INTERNAL. The worker gives its blocks up, and serves."""
    async with World(num_blocks=100, block_size=4).running() as world:
        for token in range(6):
            await world.answered([token] * 20, 3)
        world.wire.break_reports = limits == Limits()
        world.wire.manager = CacheManager(world.manager.epoch + 1, limits=limits)
        await until(lambda: not world.cache.state.holds_anything)
        await until(world.is_open.is_set)
        assert world.manager.budget.num_blocks == 0
        await world.answered([1] * 20, 3)
        assert world.wire.num_calls["Report"] == 1


# -- how many blocks it keeps ahead of need


@pytest.mark.parametrize(
    ("steps", "least", "most"),
    [
        ([(30, 0.01)], 380, 420),
        ([(1_000, 0.02), (30, 0.01)], 380, 420),
        ([(100, 0.01), (10, 0.1)], 300, 400),
        ([(100, 0.01), (300, 0.1)], 36, 44),
    ],
    ids=["a few dozen steps", "a change", "a second of slow steps", "half a minute of slow steps"],
)
def test_the_rate_follows_a_lasting_change_and_no_short_one(
    steps: list[tuple[int, float]], least: float, most: float
) -> None:
    """Whatever kept the cores busy for a second may be gone the next moment, and the manager too. Steps of so many seconds, each of
    which samples 4 tokens."""
    rate, now = DecodingRate(), 0.0
    rate.note(4, now)
    for count, seconds in steps:
        for _ in range(count):
            now += seconds
            rate.note(4, now)
    assert least <= rate.tokens_per_second <= most


def test_the_reserve_lasts_the_seconds_that_it_should() -> None:
    """At least a block for each sequence, enough for the seconds at the present rate, and never more than can be needed."""
    assert spare_target(8, 100, 0.0, 2.0, 16) == 8
    assert spare_target(8, 100, 400.0, 2.0, 16) == 50
    assert spare_target(8, 30, 400.0, 2.0, 16) == 30
    assert spare_target(0, 0, 400.0, 2.0, 16) == 0


async def test_nothing_is_given_back_to_a_manager_that_does_not_answer() -> None:
    """Decoding becomes slow while it is away: what then is too much may be needed yet, and cannot be had again."""
    world = World(num_blocks=2_000, block_size=4, reserve_seconds=2.0)
    world.model.step_seconds = 0.002
    async with world.running():
        request = world.submit(list(range(10)), 1_200)
        await until(lambda: world.cache.num_spare_blocks[0] > 100)
        world.wire.is_cut = True
        await until(lambda: world.cache.state.link is not None and world.cache.state.link.is_unanswered)
        before = world.cache.num_spare_blocks[0] + request.sequence.num_entries
        world.model.step_seconds, world.cache.state.rate.tokens_per_second = 0.1, 1.0
        calls = sum(world.wire.num_calls.values())
        await until(lambda: sum(world.wire.num_calls.values()) > calls + 2)
        assert world.cache.num_spare_blocks[0] + request.sequence.num_entries == before
        world.model.step_seconds, world.wire.is_cut = 0.0, False
        await read_right(request)
