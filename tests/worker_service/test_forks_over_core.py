"""Several answers and beams, by the engine over the manager's core: right texts, the prompt computed once, nothing leaked."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import Limits
from kvpool.protocol.answers import answer_id
from kvpool.v1 import worker_pb2
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.engine.policy import SchedulingPolicy
from kvpool.worker_service.engine.stream import EndReason, StreamChunk
from tests import tracer
from tests.tracer import expected_text
from tests.until import until
from tests.worker_service.world import (
    SEED,
    Wire,
    World,
    failed,
    prompts_with_shared_beginnings,
    read_all,
    read_right,
    right_texts,
    searching,
    several,
)

pytestmark = pytest.mark.usefixtures("brief_backoff")


async def test_the_prompt_is_computed_once_and_only_tails_are_held_beside_it() -> None:
    prompt, n, count = list(range(100)), 8, 5
    world = World(num_blocks=200, block_size=4, max_num_seqs=n)
    most_used = 0
    async with world.running():
        request = world.submit(prompt, count, **several(n))
        reading = asyncio.create_task(read_right(request))
        while not reading.done():
            most_used = max(most_used, *world.cache.num_used_blocks)
            await asyncio.sleep(0)
        await reading
    assert world.model.num_forwarded == len(prompt) + n * (count - 1)
    num_full, num_all = len(prompt) // 4, -(-(len(prompt) + count - 1) // 4)
    assert most_used <= num_full + n * (num_all - num_full)


EARLY_STOPPING = worker_pb2.EarlyStopping.values()
FEW_ENDING = frozenset(range(0, tracer.VOCAB_SIZE, 512))


@pytest.mark.parametrize("seed", range(7))
async def test_a_bad_wire_and_a_tight_pool_change_no_answer(seed: int) -> None:
    """Of many requests of both kinds, in every policy and size of pool and blocks; some lose their reader."""
    rng = random.Random(seed)
    wire = Wire(CacheManager(1), seed)
    if seed % 3:
        wire.lose_request, wire.lose_reply, wire.repeat_later = 0.1, 0.1, 0.2
    block_size = rng.choice([1, 4, 4, 16])
    num_blocks = {1: rng.randint(120, 200), 4: rng.randint(36, 60), 16: rng.randint(12, 20)}[block_size]
    max_num_seqs = rng.randint(4, 10)
    world = World(
        num_blocks=(num_blocks,) if rng.random() < 0.5 else (num_blocks, num_blocks + 9),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 8, 40]),
        max_mixed_prefill_tokens=rng.choice([1, 8, 64]),
        scheduling_policy=rng.choice(list(SchedulingPolicy)),
        prefix_caching=rng.random() < 0.7,
        reserve_seconds=rng.choice([0.0, 2.0]),
        wire=wire,
    )
    async with world.running():
        requests = []
        for number, prompt in enumerate(prompts_with_shared_beginnings(rng, 14, 40)):
            num_beams = rng.randint(2, 4)
            if number % 3 == 0:
                how = {"early_stopping": rng.choice(EARLY_STOPPING), "length_penalty": rng.choice([0.0, 1.0])}
                options = searching(num_beams, rng.randint(1, num_beams), **how)
                options["stop_token_ids"] = rng.choice([frozenset(), FEW_ENDING])
            else:
                options = several(rng.randint(1, 6))
            options |= {"tenant": rng.choice("ab"), "priority": rng.randint(-1, 1)}
            requests.append(world.submit(prompt, rng.randint(1, 14), **options))
        gone = rng.sample(requests, 3)
        for request in gone:
            await asyncio.sleep(rng.random() * 0.05)
            world.engine.abort(request)
            request.stream.fail(EngineError(ErrorKind.INTERNAL, "gone"))
        for request in requests:
            try:
                texts = await read_all(request)
            except EngineError as error:
                assert request in gone
                assert error.message == "gone"  # noqa: PT017 - most of these requests do not fail
            else:
                assert texts == right_texts(request)


async def test_a_search_goes_on_whose_forks_the_manager_refuses() -> None:
    """Their parents, which have ended, keep their blocks, and the whole pool is the search's own: it would wait for itself."""
    world = World(num_blocks=20, block_size=4, max_num_seqs=8)
    world.manager.limits = Limits(max_sequences_per_session=3)
    async with world.running():
        group = await world.answered(list(range(9)), 13, **searching(4, 1))
        assert group.num_preemptions > 0


async def test_no_step_of_beams_waits_for_a_call() -> None:
    async with World(num_blocks=400, block_size=4, max_num_seqs=8, reserve_seconds=1.0).running() as world:
        await world.answered([1, 2, 3], 40, **searching(4, 1))
        assert world.cache.num_reserve_waits == 0


async def test_a_stream_lives_as_long_as_one_of_its_answers() -> None:
    """Else the answers of a second stream of that name would take the place of the first one's, which no step would end."""
    world = World(num_blocks=200, block_size=4, max_num_seqs=8)
    prompt = list(range(10))
    texts = [expected_text(prompt, 30, seed=SEED + index) for index in range(3)]
    ending = next(token for token in texts[0] if all(token not in text for text in texts[1:]))
    async with world.running():
        request = world.submit(prompt, 30, sequence_id="a", stop_token_ids=frozenset({ending}), **several(3))
        await until(lambda: request.finish_reason is not None)
        assert not all(answer.finish_reason for answer in request.answers)
        with pytest.raises(EngineError, match="already has a stream") as caught:
            world.submit(prompt, 3, sequence_id="a", **several(3))
        assert caught.value.kind is ErrorKind.EXISTS
        assert (await read_all(request))[1:] == texts[1:]
        await world.answered(prompt, 3, sequence_id="a", **several(3))


@pytest.mark.parametrize("options", [several(3), searching(4, 1)], ids=["sampled", "beams"])
async def test_no_stream_has_a_name_that_another_may_give(options: dict[str, Any]) -> None:
    """The names of a caller's requests are free: only what would clash is refused, and only while it lives."""
    async with World(num_blocks=200, block_size=4, max_num_seqs=8).running() as world:
        several_at_once = world.submit([1, 2], 6, sequence_id="a", **options)
        with pytest.raises(EngineError, match="another sequence_id"):
            world.submit([1, 2], 6, sequence_id="a.7")
        others = [world.submit([1, 2], 6, sequence_id=name) for name in ("b.1", "b.2", "a.x", "a.1.1", "b")]
        later = world.submit([1, 2], 6, sequence_id="a.7", attempt=2)
        with pytest.raises(EngineError, match="another sequence_id"):
            world.submit([1, 2], 6, sequence_id="b", **options)
        await read_right(several_at_once, *others, later)
        await world.answered([1, 2], 6, sequence_id="b", **options)


async def test_a_failed_step_ends_the_forks_whose_copies_it_had() -> None:
    async with World(num_blocks=100, block_size=4, max_num_seqs=8).running() as world:
        for options in (several(4), searching(4, 4)):
            request = world.submit(list(range(10)), 50, **options)
            await until(lambda: request.num_generated >= 1)  # noqa: B023
            world.model.fail_next = True
            await failed(request)
        await world.answered(list(range(10)), 5, **several(3))


async def test_a_larger_attempt_elsewhere_ends_the_whole_request() -> None:
    """Of any of its sequences: the caller has gone on without this worker."""
    async with World(num_blocks=100, block_size=4, max_num_seqs=8).running() as world:
        request = world.submit(list(range(10)), 300, sequence_id="s", **several(3))
        await until(lambda: request.num_generated > 3 and len(request.answers) == 3)
        await until(lambda: not world.cache.state.forks)
        elsewhere = World(num_blocks=100, block_size=4, worker_id="w1", wire=world.wire)
        async with elsewhere.running():
            await elsewhere.answered([1, 2], 3, sequence_id=answer_id("s", 2), attempt=2)
        assert (await failed(request)).error.kind is ErrorKind.SUPERSEDED


async def test_usage_and_statistics_count_the_prompt_once() -> None:
    prompt = list(range(20))
    async with World(num_blocks=100, block_size=4, max_num_seqs=8).running() as world:
        chunks: list[StreamChunk] = []
        request = world.submit(prompt, 6, **several(3))
        while (chunk := await request.stream.get()) is not None:
            chunks.append(chunk)
        last = [chunk.usage for chunk in chunks if chunk.finish_reason is EndReason.LENGTH]
        assert [(usage.num_prompt_tokens, usage.num_generated_tokens) for usage in last if usage] == [(20, 6)] * 3
        stats = world.engine.stats
        assert (stats.num_prompt_tokens, stats.num_admitted_tokens, stats.num_generated_tokens) == (20, 20, 18)
        assert stats.ended.total() == 1
        assert stats.request_generated_tokens.count == 1
