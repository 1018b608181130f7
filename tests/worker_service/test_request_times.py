"""Where the time of a request goes."""

from __future__ import annotations

import random

import pytest

from kvpool.worker_service.codec import encode_usage
from kvpool.worker_service.engine.request_times import EngineTimes, RequestTimes
from kvpool.worker_service.engine.stream import RequestUsage
from tests.lockstep import in_lockstep
from tests.worker_service.test_engine_over_core import prompts_with_shared_beginnings
from tests.worker_service.world import World


def request(*, arrived_at: float = 10.0, granted_at: float = 11.0) -> RequestTimes:
    """One that has blocks and no token."""
    times = RequestTimes()
    times.arrived_at, times.granted_at = arrived_at, granted_at
    return times


def test_a_preemption_counts_until_the_request_is_as_far_as_before() -> None:
    """A step that computes only a part of what was lost does not end it."""
    times = request()
    times.on_token(13.0)
    times.on_preempted(40, 20.0)
    times.on_computed(39, 24.0)
    times.on_computed(41, 25.0)
    times.on_computed(42, 26.0)
    times.on_token(30.0)
    assert times.totals() == EngineTimes(waiting=1.0, prefill=2.0, decode=12.0, preempted=5.0)


def test_a_preemption_before_the_first_token_is_no_prefill() -> None:
    """Each part of the time is counted once."""
    times = request()
    times.on_preempted(40, 12.0)
    times.on_computed(40, 15.0)
    times.on_token(16.0)
    assert times.totals() == EngineTimes(waiting=1.0, prefill=2.0, decode=0.0, preempted=3.0)


def test_a_request_that_is_preempted_on_its_way_back_goes_on_waiting_for_the_same_place() -> None:
    """The second time it has less to lose, and still needs what it had first."""
    times = request()
    times.on_token(12.0)
    times.on_preempted(40, 20.0)
    times.on_computed(8, 21.0)
    times.on_preempted(8, 22.0)
    times.on_computed(16, 23.0)
    times.on_computed(40, 24.0)
    times.on_token(30.0)
    assert times.totals() == EngineTimes(waiting=1.0, prefill=1.0, decode=14.0, preempted=4.0)


def test_a_preemption_after_the_last_token_is_no_part_of_the_time() -> None:
    """The request ends before it has another token: cancelled, or at its deadline."""
    times = request()
    times.on_token(12.0)
    times.on_preempted(40, 12.0)
    times.on_computed(40, 15.0)
    assert times.totals() == EngineTimes(waiting=1.0, prefill=1.0, decode=0.0, preempted=0.0)


def test_without_a_token_there_is_nothing_to_say() -> None:
    """Neither before it nor without blocks."""
    assert RequestTimes().totals() is None
    assert request().totals() is None


def test_milliseconds_are_rounded_down() -> None:
    """So that their sum is at most the time that the request took."""
    message = encode_usage(RequestUsage(3, 0, 1, 0, times=EngineTimes(0.0019, 0.0029, 0.0039, 0.0049)))
    times = message.times
    assert (times.waiting_ms, times.prefill_ms, times.decode_ms, times.preempted_ms) == (1, 2, 3, 4)
    assert not encode_usage(RequestUsage(3, 0, 1, 0)).HasField("times")


@pytest.mark.parametrize("num_blocks", [400, 14], ids=["roomy", "preempting"])
async def test_the_parts_add_up_to_the_time_from_arrival_to_the_last_token(num_blocks: int) -> None:
    """With preemptions or without, and only the preempted have lost time to that."""
    prompts = prompts_with_shared_beginnings(random.Random(num_blocks), 20, 24)
    world = World(num_blocks=num_blocks, block_size=4, max_num_seqs=6, max_num_batched_tokens=16)
    async with world.running():
        requests = [world.submit(prompt, 20) for prompt in prompts]
        async with in_lockstep(world.engine, len(requests)):
            for one in requests:
                while (chunk := await one.stream.get()) is not None:
                    assert chunk.usage is None or (chunk.usage.times is None) == (chunk.finish_reason is None)
    for one in requests:
        found = one.times.totals()
        assert found is not None
        assert min(found) >= 0
        assert sum(found) == pytest.approx(one.times.last_token_at - one.times.arrived_at)
        assert (found.preempted > 0) == (one.num_preemptions > 0)
    assert any(one.num_preemptions for one in requests) == (num_blocks == 14)
