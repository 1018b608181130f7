"""What the engine counts: against traffic whose numbers are known, and against times that are given; where time goes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvpool.v1 import worker_pb2
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.engine.request_times import RequestTimes
from kvpool.worker_service.engine.stats import EngineStats
from tests.lockstep import in_lockstep
from tests.worker_service.world import World, prompts_with_shared_beginnings, read

Times = tuple[float, float, float, float]
"""Seconds that a request waited, was in prefill, decoded and was preempted."""


async def test_times_of_a_request_are_told_from_its_arrival() -> None:
    """Arrived at 10 s, blocks at 12, tokens at 13, 13.5 and 15: each interval is in its place, and each once."""
    async with World(num_blocks=9, block_size=4).running() as world:
        request = world.submit([1, 2, 3], 1)
        stats = EngineStats()
        request.times.arrived_at = 10.0
        request.times.granted_at = None
        stats.on_granted(request, 12.0)
        stats.on_granted(request, 12.5)  # after a preemption
        for now in (13.0, 13.5, 15.0):
            stats.on_token(request, now)
        stats.on_finished(request, "stop", 15.0)
        assert (stats.queue_seconds.count, stats.queue_seconds.sum) == (1, 2.0)
        assert (stats.first_token_seconds.count, stats.first_token_seconds.sum) == (1, 3.0)
        assert (stats.inter_token_seconds.count, stats.inter_token_seconds.sum) == (2, 2.0)
        assert dict(stats.inter_token_seconds.cumulative())[0.5] == 1
        assert (stats.prefill_seconds.sum, stats.decode_seconds.sum) == (1.0, 2.0)
        assert (stats.request_seconds.count, stats.request_seconds.sum) == (1, 5.0)
        assert (stats.num_admitted_tokens, stats.num_prompt_tokens, stats.num_generated_tokens) == (3, 3, 3)
        assert stats.ended == {"stop": 1}
        await read(request)


@pytest.mark.parametrize("num_blocks", [400, 14], ids=["roomy", "preempting"])
async def test_tokens_and_times_add_up(num_blocks: int) -> None:
    """What the model has forwarded is what was prefilled and decoded; without preemptions nothing is computed twice. The
    parts of each request's time add up to that from its arrival to its last token; only the preempted have lost time to that."""
    prompts = prompts_with_shared_beginnings(random.Random(num_blocks), 20, 24)
    world = World(num_blocks=num_blocks, block_size=4, max_num_seqs=6, max_num_batched_tokens=16)
    async with world.running():
        requests = []
        for _ in range(2):
            requests += [world.submit(prompt, 20) for prompt in prompts]
            async with in_lockstep(world.engine, len(prompts)):
                for one in requests[-len(prompts) :]:
                    while (chunk := await one.stream.get()) is not None:
                        assert chunk.usage is None or chunk.usage.HasField("times") != (chunk.finish_reason is None)
    stats = world.engine.stats
    num_requests = 2 * len(prompts)
    assert stats.ended == {"length": num_requests}
    assert stats.num_generated_tokens == 20 * num_requests
    assert stats.num_prompt_tokens == stats.num_admitted_tokens == 2 * sum(map(len, prompts))
    assert 0 < stats.num_cached_tokens < stats.num_admitted_tokens
    assert stats.num_forwarded_tokens == world.model.num_forwarded
    assert stats.num_steps == world.model.num_steps == stats.step_seconds.count == stats.step_tokens.count
    assert stats.step_tokens.sum == stats.num_forwarded_tokens
    assert stats.first_token_seconds.count == stats.queue_seconds.count == stats.request_seconds.count == num_requests
    assert stats.inter_token_seconds.count == 19 * num_requests
    assert stats.request_generated_tokens.sum == stats.num_generated_tokens
    for one in requests:
        found = one.times.totals()
        assert found is not None
        total = found.waiting_ms + found.prefill_ms + found.decode_ms + found.preempted_ms
        assert total == pytest.approx(1000 * (one.times.last_token_at - one.times.arrived_at), abs=4)
        assert one.num_preemptions > 0 or not found.preempted_ms
    prefilled = stats.num_forwarded_tokens - stats.num_decoded_tokens
    if num_blocks == 400:
        assert world.engine.scheduler.num_preemptions == 0
        assert prefilled == stats.num_admitted_tokens - stats.num_cached_tokens
        assert stats.num_decoded_tokens == 19 * num_requests
    else:
        assert world.engine.scheduler.num_preemptions > 0


async def test_each_end_is_counted_once_and_under_its_name() -> None:
    """Also when it is told twice, as gRPC does, or comes while a step runs that fails."""
    async with World(num_blocks=100, block_size=4).running() as world:
        await world.answered([1, 2, 3], 5)
        abandoned = world.submit([4, 5, 6], 100)
        for _ in range(2):
            world.engine.abort(abandoned)
        failed = world.submit([7, 8, 9], 100)
        world.engine.fail_all(EngineError(ErrorKind.UNAVAILABLE, "the end"))
        world.engine.abort(failed)
    assert world.engine.stats.ended == {"length": 1, "cancelled": 1, "unavailable": 1}
    assert world.engine.stats.request_seconds.count == 1


# -- where the time of a request goes


@pytest.mark.parametrize(
    ("events", "totals"),
    [
        pytest.param(
            [("token", 13), ("preempted", 40, 20), ("computed", 39, 24), ("computed", 41, 25), ("computed", 42, 26), ("token", 30)],
            (1.0, 2.0, 12.0, 5.0),
            id="until it is as far as before: a step that computes only a part of what was lost does not end it",
        ),
        pytest.param(
            [("preempted", 40, 12), ("computed", 40, 15), ("token", 16)],
            (1.0, 2.0, 0.0, 3.0),
            id="before the first token: no prefill",
        ),
        pytest.param(
            [("token", 12), ("preempted", 40, 20), ("computed", 8, 21), ("preempted", 8, 22), ("computed", 16, 23),
             ("computed", 40, 24), ("token", 30)],
            (1.0, 1.0, 14.0, 4.0),
            id="twice: the second time it has less to lose, and still needs what it had first",
        ),
        pytest.param(
            [("token", 12), ("preempted", 40, 12), ("computed", 40, 15)],
            (1.0, 1.0, 0.0, 0.0),
            id="after the last token: no part of the time, as the request ends before it has another one",
        ),
        pytest.param([], None, id="without a token there is nothing to say"),
    ],
)  # fmt: skip
def test_the_time_of_a_preemption_is_counted_once(events: list[Any], totals: Times | None) -> None:
    """It arrived at 10 s, and had blocks at 11."""
    times = RequestTimes()
    times.arrived_at, times.granted_at = 10.0, 11.0
    for what, *arguments in events:
        getattr(times, f"on_{what}")(*arguments)
    assert times.totals() == (None if totals is None else _message(*totals))
    assert RequestTimes().totals() is None


def _message(*seconds: float) -> worker_pb2.Times:
    waiting, prefill, decode, preempted = (int(1000 * each) for each in seconds)
    return worker_pb2.Times(waiting_ms=waiting, prefill_ms=prefill, decode_ms=decode, preempted_ms=preempted)


def test_milliseconds_are_rounded_down() -> None:
    """So that their sum is at most the time that the request took."""
    times = RequestTimes(arrived_at=0.0, granted_at=0.0019)
    times.on_token(0.0048)
    times.on_preempted(4, 0.005)
    times.on_computed(4, 0.0099)
    times.on_token(0.0136)
    assert times.totals() == _message(0.001, 0.002, 0.003, 0.004)
