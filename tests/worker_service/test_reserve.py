"""How many blocks a worker keeps ahead of need, so that it can decode on while the manager is away."""

from __future__ import annotations

import asyncio

import pytest

from kvpool.worker_service.cache.reserve import DecodingRate, spare_target
from tests.tracer import expected_text
from tests.until import until
from tests.worker_service.world import World, read

pytestmark = pytest.mark.usefixtures("brief_backoff")


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
        assert await asyncio.wait_for(read(request), 60) == expected_text(list(range(10)), 1_200)
