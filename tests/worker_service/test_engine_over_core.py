"""The engine over the manager's core: right text, nothing computed twice, nothing leaked, whatever happens on the wire."""

from __future__ import annotations

import asyncio
import math
import random
import threading

import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import Limits
from kvpool.worker_service.cache.sequence import SequenceState
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.step import BadLogits
from tests.tracer import expected_text
from tests.until import until
from tests.worker_service.world import Wire, World, failed, read, read_right

pytestmark = pytest.mark.usefixtures("brief_backoff")


async def test_a_thousand_calls_compute_their_common_prompt_once() -> None:
    """One 512-token system prompt, 64 at a time: 512 tokens computed once, 999 × 512 = 511,488 not again."""
    rng = random.Random(1)
    system = [rng.randrange(1000) for _ in range(512)]
    async with World(num_blocks=6000, block_size=16, max_num_seqs=64).running() as world:
        places = asyncio.Semaphore(64)

        async def call() -> int:
            async with places:
                request = await world.answered(system + [rng.randrange(1000) for _ in range(16)], 4)
            return request.num_cached_tokens

        cached = await asyncio.gather(*(call() for _ in range(1000)))
        assert sum(cached) == 511_488
        assert world.model.num_forwarded == 512 + 1000 * (16 + 3)
        assert world.cache.num_reserve_waits == 0


@pytest.mark.parametrize("how", ["cancelled", "preempted", "stopped", "bad logits"])
async def test_those_who_wait_go_on_when_their_leader_ends(how: str) -> None:
    """A leader that is cancelled, preempted or fenced in mid-prefill leaves fifteen waiting; they compute the rest themselves. So
    does one whose last token is bad, in the step that computes the end of the prefix."""
    system = list(range(400))
    world = World(num_blocks=600, block_size=16, max_num_seqs=16, max_num_batched_tokens=32)
    gate = world.model.gate = threading.Event()
    async with world.running():
        requests = [world.submit([*system, 1000 + i], 3) for i in range(16)]
        await until(lambda: sum(request.sequence.state is SequenceState.PARKED for request in requests) >= 15)
        leader = next(request for request in requests if request.sequence.state is SequenceState.LIVE)
        others = [request for request in requests if request is not leader]
        if how == "cancelled":
            world.engine.abort(leader)
        elif how == "preempted":
            world.engine.scheduler._preempt(leader, world.wire.now())
        elif how == "bad logits":
            world.model.bad_behind[leader.params.token_ids[-1]] = BadLogits(0, math.nan)
        else:
            elsewhere = World(num_blocks=600, block_size=16, worker_id="w1", wire=world.wire)
            async with elsewhere.running():
                await elsewhere.answered([*system, 7], 3, sequence_id=leader.params.sequence_id, attempt=2)
        gate.set()
        await read_right(*others)
        if how == "preempted":
            await read_right(leader)
        if how in ("stopped", "bad logits"):
            kind = ErrorKind.SUPERSEDED if how == "stopped" else ErrorKind.INTERNAL
            assert (await failed(leader)).error.kind is kind


async def test_a_call_never_outgrows_a_message() -> None:
    async with World(num_blocks=4000, block_size=4, max_call_bytes=2000).running() as world:
        await read_right(*(world.submit([i, *range(200)], 2) for i in range(12)))
        assert world.wire.num_calls["Allocate"] >= 8


async def test_a_link_that_breaks_in_part_breaks_as_a_whole() -> None:
    """A heartbeat that dies of a bug must not leave a worker that is fenced and says it serves."""
    world = World(num_blocks=40, block_size=4)
    world.engine.load = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(world.link.talk_to(world.wire), 30)  # type: ignore[arg-type]


async def test_a_worker_with_more_places_than_the_manager_takes_sequences_lets_the_others_wait() -> None:
    """TOO_MANY_SEQUENCES is an answer for now: it ends no request."""
    limits = Limits(max_sequences_per_session=2)
    world = World(num_blocks=64, block_size=4, max_num_seqs=6, wire=Wire(CacheManager(1, limits=limits)))
    async with world.running():
        await read_right(*(world.submit([10 * index, 1, 2], 6) for index in range(6)))


async def test_as_many_tokens_as_fit_fill_the_pool() -> None:
    """The last token needs no slot: 16 slots take 6 prompt tokens and 11 new ones."""
    async with World(num_blocks=5, block_size=4).running() as world:
        assert await read(world.submit(list(range(6)), 0)) == expected_text(list(range(6)), 11)


# -- a worker whose pool is larger than what the manager may keep


@pytest.mark.parametrize("limits", [Limits(max_total_blocks=12), Limits(max_total_tokens=48)], ids=["blocks", "tokens"])
async def test_every_request_comes_to_its_end_under_a_small_budget(limits: Limits) -> None:
    """A pool of 500 blocks of which 12 can be granted: the worker takes it for a pool of 12."""
    rng = random.Random(5)
    async with World(num_blocks=500, block_size=4, wire=Wire(CacheManager(1, limits=limits))).running() as world:
        prompts = [[rng.randrange(50) for _ in range(rng.randrange(1, 20))] for _ in range(12)]
        async with asyncio.timeout(30):
            await read_right(*(world.submit(prompt, 20) for prompt in prompts))
        budget = world.manager.budget
        assert budget.num_blocks <= 12
        assert world.manager.worker("w0").pools[0].num_withheld == 499 - budget.num_blocks
        assert world.link.num_sessions == 1


# -- leaving: what runs ends, what waits is sent away at once, and nothing new is taken


PROMPT = list(range(20))


def for_two() -> World:
    """One that runs two requests at a time."""
    return World(num_blocks=200, block_size=4, max_num_seqs=2)


async def test_what_runs_ends_and_what_waits_is_sent_away() -> None:
    async with (subject := for_two()).running():
        running = [subject.submit([i, *PROMPT], 40) for i in range(2)]
        for request in running:
            await request.stream.get()
        waiting = [subject.submit([i, *PROMPT], 40) for i in range(7, 10)]
        subject.engine.begin_drain()
        for request in waiting:
            assert (await failed(request)).error.kind is ErrorKind.DRAINING
        with pytest.raises(EngineError) as refused:
            subject.submit(PROMPT, 1)
        assert refused.value.kind is ErrorKind.DRAINING
        await asyncio.wait_for(subject.engine.wait_until_empty(), 20)
        for i, request in enumerate(running):
            rest = [token.token_id for token in (await request.stream.get() or pytest.fail("no chunk")).tokens]
            assert rest == expected_text([i, *PROMPT], 40)[-len(rest) :]
            assert request.num_generated == 40


async def test_a_preempted_request_has_begun_and_may_end() -> None:
    """The pool holds one of the two: the younger one waits, half done, when the draining begins."""
    subject = World(num_blocks=14, block_size=4, max_num_seqs=2)
    async with subject.running():
        older, younger = subject.submit([1, *PROMPT], 24), subject.submit([2, *PROMPT], 24)
        await until(lambda: younger.num_preemptions, pause=0)
        assert subject.engine.scheduler.num_waiting == 1
        subject.engine.begin_drain()
        await read_right(older, younger)


async def test_an_idle_engine_is_empty_and_tells_the_manager_at_once() -> None:
    async with (subject := for_two()).running():
        subject.engine.begin_drain()
        await asyncio.wait_for(subject.engine.wait_until_empty(), 30)
        subject.link.send_heartbeat()
        await until(lambda: subject.manager.worker("w0").draining, pause=0)
