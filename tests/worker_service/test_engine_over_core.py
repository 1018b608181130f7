"""The engine over the manager's core: right text, nothing computed twice, nothing leaked, whatever happens on the wire."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from typing import Any

import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import Limits
from kvpool.worker_service.cache.sequence import SequenceState
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.engine.request import Request
from kvpool.worker_service.step import BadLogits
from tests.lockstep import in_lockstep
from tests.tracer import VOCAB_SIZE, expected_text
from tests.until import until
from tests.worker_service.world import Wire, World, failed, read, read_right

pytestmark = pytest.mark.usefixtures("brief_backoff")


def prompts_with_shared_beginnings(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    """Prompts of which many begin alike, some are equal, some unrelated."""
    trunk = [rng.randrange(1000) for _ in range(longest)]
    prompts = []
    for _ in range(count):
        shared = rng.choice([0, longest // 4, longest // 2, longest - 1])
        prompts.append(trunk[:shared] + [rng.randrange(1000) for _ in range(rng.randint(1, max(1, longest - shared)))])
    return prompts


async def test_a_thousand_calls_compute_their_common_prompt_once() -> None:
    """One 512-token system prompt, 64 at a time: 512 tokens computed once, 999 × 512 = 511,488 not again."""
    rng = random.Random(1)
    system = [rng.randrange(1000) for _ in range(512)]
    world = World(num_blocks=6000, block_size=16, max_num_seqs=64)
    async with world.running():
        places = asyncio.Semaphore(64)

        async def call() -> int:
            prompt = system + [rng.randrange(1000) for _ in range(16)]
            async with places:
                request = world.submit(prompt, 4)
                assert await read(request) == expected_text(prompt, 4)
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
                text = await elsewhere.generate([*system, 7], 3, sequence_id=leader.params.sequence_id, attempt=2)
                assert text == expected_text([*system, 7], 3)
        gate.set()
        await read_right(*others)
        if how == "preempted":
            assert await read(leader) == expected_text(leader.params.token_ids, 3)
        if how in ("stopped", "bad logits"):
            kind = ErrorKind.SUPERSEDED if how == "stopped" else ErrorKind.INTERNAL
            assert (await failed(leader)).error.kind is kind


@pytest.mark.parametrize(
    ("prompt", "count", "field", "words"),
    [
        ([], 4, "prompt", "at least one token"),
        ([1, VOCAB_SIZE], 4, "prompt", f"vocabulary of {VOCAB_SIZE}"),
        ([1] * 4096, 1, "prompt", "leave no room"),
        ([1] * 4000, 200, "max_tokens", "at most 96"),
        ([1] * 300, 10, "max_tokens", "lower max_tokens"),
    ],
)
async def test_a_bad_request_is_told_what_was_needed(prompt: list[int], count: int, field: str, words: str) -> None:
    """The error names the field, what there is, and what to change; nothing is queued."""
    world = World(num_blocks=60, block_size=4)
    async with world.running():
        with pytest.raises(EngineError, match=words) as caught:
            world.submit(prompt, count)
        assert caught.value.field == field
        assert world.engine.load().num_waiting == 0


async def test_one_stream_per_attempt_and_a_bounded_queue() -> None:
    """A second stream for one (sequence, attempt) and a full queue are refused."""
    world = World(num_blocks=60, block_size=4, max_num_waiting=2)
    async with world.running():
        world.wire.gate = asyncio.Event()
        first = world.submit([1, 2], 2, sequence_id="a")
        with pytest.raises(EngineError) as caught:
            world.submit([1, 2], 2, sequence_id="a")
        assert caught.value.kind is ErrorKind.EXISTS
        second = world.submit([1, 2], 2, sequence_id="a", attempt=2)
        with pytest.raises(EngineError) as full:
            world.submit([1, 2], 2, sequence_id="b")
        assert full.value.kind is ErrorKind.BUSY
        world.wire.gate.set()
        assert await read(second) == expected_text([1, 2], 2)
        # The larger attempt may fence the smaller before it ends; either way it ends.
        try:
            assert await read(first) == expected_text([1, 2], 2)
        except EngineError as error:
            assert error.kind in (ErrorKind.SUPERSEDED, ErrorKind.REFUSED)  # noqa: PT017


async def test_a_grant_whose_reply_was_lost_is_asked_for_again_even_while_the_pool_is_exhausted() -> None:
    """The manager holds blocks for a sequence that this worker takes for waiting; nobody else can use or free them."""
    world = World(num_blocks=34, block_size=1)
    gate = world.model.gate = threading.Event()
    async with world.running():
        first = world.submit(list(range(10)), 20)
        await until(lambda: first.sequence.state is SequenceState.LIVE, pause=0)
        world.wire.lose_next_reply = "Allocate"
        second = world.submit(list(range(100, 120)), 2)
        await until(lambda: world.wire.is_cut, pause=0)
        gate.set()
        # Now let the first run into the end of the pool, and keep Allocate back until it has.
        world.cache.state.ask_again_at = world.wire.now() + 3600
        world.wire.is_cut = False
        assert await read(first) == expected_text(list(range(10)), 20)
        assert await read(second) == expected_text(list(range(100, 120)), 2)


async def test_a_lost_grant_that_is_then_fenced_elsewhere_is_freed() -> None:
    """The answer to Allocate is lost, a larger attempt fences the sequence, the repeat is refused: the blocks come back all
    the same."""
    world = World(num_blocks=40, block_size=4)
    other = World(num_blocks=40, block_size=4, worker_id="w1", wire=world.wire)
    async with world.running(), other.running():
        world.wire.lose_next_reply = "Allocate"
        first = world.submit(list(range(20)), 4, sequence_id="a")
        await until(lambda: world.wire.is_cut, pause=0)
        # The worker hears nothing while the client moves on.
        world.cache.state.link.retry_at = world.wire.now() + 3600  # type: ignore[union-attr]
        world.wire.is_cut = False
        assert await other.generate(list(range(20)), 4, sequence_id="a", attempt=2) == expected_text(list(range(20)), 4)
        world.cache.state.link.retry_at = 0.0  # type: ignore[union-attr]
        world.engine.changed_for_link.set()
        with pytest.raises(EngineError) as caught:
            await read(first)
        # Refused on asking again, or stopped by the downlink, whichever comes first; or served, if attempt 2 ended before.
        assert caught.value.kind in (ErrorKind.REFUSED, ErrorKind.SUPERSEDED)
        await world.until_idle()
        assert world.manager.worker("w0").pools[0].counts().held == 0


async def test_a_call_never_outgrows_a_message() -> None:
    """Many long prompts go out in several calls; each is served."""
    world = World(num_blocks=4000, block_size=4, max_call_bytes=2000)
    async with world.running():
        requests = [world.submit([i, *range(200)], 2) for i in range(12)]
        await read_right(*requests)
        assert world.wire.num_calls["Allocate"] >= 8


async def test_a_link_that_breaks_in_part_breaks_as_a_whole() -> None:
    """A heartbeat that dies of a bug must not leave a worker that is fenced and says it serves."""
    world = World(num_blocks=40, block_size=4)
    world.engine.load = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(world.link.talk_to(world.wire), 30)  # type: ignore[arg-type]


async def run_until_preempted(world: World, **params: Any) -> Request:
    """A long text fills the pool, so that the request next to it is preempted while it decodes; both end."""
    first = world.submit(list(range(100, 104)), 40)
    second = world.submit(list(range(12)), 40, **params)
    async with in_lockstep(world.engine, 2):
        assert await read(first) == expected_text(list(range(100, 104)), 40)
        assert await read(second) == expected_text(list(range(12)), 40)
    assert second.num_preemptions > 0
    return second


async def test_a_preempted_request_reports_the_cached_tokens_of_its_first_round() -> None:
    """Its later rounds hit its own blocks, which is no saving of the prompt."""
    world = World(num_blocks=14, block_size=4, max_num_seqs=2)
    async with world.running():
        request = await run_until_preempted(world)
        assert request.sequence.num_cached_tokens > 0, "the last round had a hit"
        assert request.usage().num_cached_tokens == 0


async def test_prompt_logprobs_take_no_hits_in_later_rounds_either() -> None:
    """Rows that are not computed have no logits, so a prompt must not be skipped after a preemption."""
    world = World(num_blocks=14, block_size=4, max_num_seqs=2)
    async with world.running():
        request = await run_until_preempted(world, num_prompt_logprobs=0)
        assert request.sequence.num_cached_tokens == 0


async def test_a_worker_with_more_places_than_the_manager_takes_sequences_lets_the_others_wait() -> None:
    """TOO_MANY_SEQUENCES is an answer for now: it ends no request."""
    limits = Limits(max_sequences_per_session=2)
    world = World(num_blocks=64, block_size=4, max_num_seqs=6, wire=Wire(CacheManager(1, limits=limits)))
    prompts = [[10 * index, 1, 2] for index in range(6)]
    async with world.running():
        texts = await asyncio.gather(*(world.generate(prompt, 6) for prompt in prompts))
    assert texts == [expected_text(prompt, 6) for prompt in prompts]


async def test_as_many_tokens_as_fit_fill_the_pool() -> None:
    """The last token needs no slot: 16 slots take 6 prompt tokens and 11 new ones."""
    world = World(num_blocks=5, block_size=4)
    async with world.running():
        assert await world.generate(list(range(6)), 0) == expected_text(list(range(6)), 11)


# -- a worker whose pool is larger than what the manager may keep


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
