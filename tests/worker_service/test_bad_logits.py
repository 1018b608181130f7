"""Logits that are no finite numbers end the request whose they are, and no other one of the same step."""

from __future__ import annotations

import asyncio
import math

import grpc
import pytest

from kvpool.client.errors import from_rpc_error
from kvpool.client.failover import another_may_begin, another_may_go_on
from kvpool.worker_service.engine.errors import ErrorKind
from kvpool.worker_service.status import of_error
from kvpool.worker_service.step import BadLogits
from tests.tracer import expected_text
from tests.worker_service.world import World, failed, read_right, rpc_error

NAN = BadLogits(0, math.nan)


@pytest.mark.parametrize("budget", [8, 64], ids=["in_chunks", "at_once"])
@pytest.mark.parametrize("num_tokens", [0, 4], ids=["behind_the_prompt", "while_it_decodes"])
async def test_one_request_ends_and_its_neighbours_get_their_texts(budget: int, num_tokens: int) -> None:
    """What it had got before is delivered. `running` sees that nothing is held afterwards."""
    world = World(num_blocks=200, block_size=4, max_num_seqs=8, max_num_batched_tokens=budget)
    prompts = [[i, *range(20 + i)] for i in range(5)]
    text = expected_text(prompts[2], 10)
    world.model.bad_behind[[prompts[2][-1], *text][num_tokens]] = NAN
    async with world.running():
        requests = [world.submit(prompt, 10) for prompt in prompts]
        (tokens, error), _ = await asyncio.gather(failed(requests.pop(2)), read_right(*requests))
        assert tokens == text[:num_tokens]
        assert error.kind is ErrorKind.INTERNAL
        assert f"position {len(prompts[2]) + num_tokens}: the largest logit is nan" in error.message
        assert world.engine.stats.ended == {"internal": 1, "length": 4}


async def test_a_prompt_that_cannot_be_told_of_ends_its_request_only() -> None:
    world = World(num_blocks=200, block_size=4)
    world.model.bad_behind[7] = NAN
    async with world.running():
        bad = world.submit(list(range(20)), 4, num_prompt_logprobs=0)
        beside = [world.submit(list(range(20)), 4), world.submit(list(range(30, 50)), 4, num_prompt_logprobs=0)]
        (tokens, error), _ = await asyncio.gather(failed(bad), read_right(*beside))
        assert tokens == []
        assert "position 8:" in error.message


@pytest.mark.parametrize(("bad", "num_computed", "num_cached"), [(39, 40, 32), (30, 32, 16)])
async def test_what_led_to_bad_logits_is_nobodys_hit(bad: int, num_computed: int, num_cached: int) -> None:
    """All of the step, also of a chunk that samples nothing: its rows attend to each other, those before the bad one may be lost
    too, and their blocks begin other prompts. What earlier steps have computed of the prompt stays."""
    prompt = list(range(40))
    world = World(num_blocks=200, block_size=4, max_num_seqs=8, max_num_batched_tokens=16)
    world.model.bad_rows.add(prompt[bad])
    async with world.running():
        tokens, error = await failed(world.submit(prompt, 4))
        assert tokens == []
        assert f"position {bad + 1}: the largest logit is nan" in error.message
        assert world.model.num_forwarded == num_computed
        world.model.bad_rows.clear()
        again = await world.answered(prompt, 4)
        assert again.num_cached_tokens == num_cached


@pytest.mark.parametrize(
    ("bad", "kind", "field", "words"),
    [
        (BadLogits(0, math.inf), ErrorKind.INTERNAL, "", "change the prompt"),
        (BadLogits(0, -math.inf), ErrorKind.INTERNAL, "", "change the prompt"),
        (BadLogits(0, -math.inf, is_adjusted=True), ErrorKind.INVALID, "stop.min_tokens", "lower min_tokens"),
        (BadLogits(0, math.inf, is_adjusted=True), ErrorKind.INVALID, "sampling.repetition_penalty", "nearer to 1"),
        (BadLogits(0, math.nan, is_adjusted=True), ErrorKind.INVALID, "sampling.repetition_penalty", "nearer to 1"),
    ],
)
async def test_the_error_says_whose_fault_it_is_and_is_not_tried_elsewhere(
    bad: BadLogits, kind: ErrorKind, field: str, words: str
) -> None:
    """It would fail there as well."""
    world = World(num_blocks=64, block_size=4)
    world.model.bad_behind[3] = bad
    async with world.running():
        _, error = await failed(world.submit([1, 2, 3], 4))
        assert (error.kind, error.field) == (kind, field)
        assert f"position 3: the largest logit is {bad.largest:g}" in error.message
        assert words in error.message
    status = of_error(error)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    seen = from_rpc_error(rpc_error(code, status), "worker w0")
    assert words in str(seen)
    assert not another_may_begin(seen)
    assert not another_may_go_on(seen)
