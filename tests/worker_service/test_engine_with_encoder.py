"""The engine of a model whose prompt feeds an encoder, over the manager's core: right text, and no encoder runs twice."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from kvpool.v1 import worker_pb2
from kvpool.worker_service.codec import check_generate, decode_generate
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.engine.prompt import EncoderSettings, PromptEncoder
from kvpool.worker_service.engine.request import Request
from tests.lockstep import in_lockstep
from tests.tracer import expected_text
from tests.worker_service.world import World, read, read_right, searching, several

pytestmark = pytest.mark.usefixtures("brief_backoff")

START = 2
ENCODER = EncoderSettings(max_tokens=256, vocab_size=1000, decoder_prompt=(START,))


def world_with(*, num_unit_blocks: int = 400, num_blocks: int = 400, **limits: Any) -> World:
    """A worker whose model has an encoder."""
    return World(
        num_blocks=num_blocks,
        block_size=limits.pop("block_size", 4),
        num_unit_blocks=num_unit_blocks,
        encoder=limits.pop("encoder", ENCODER),
        **limits,
    )


def ask(world: World, prompt: list[int], count: int, delivered: tuple[int, ...] = (), **params: Any) -> Request:
    """A request with a prompt for the encoder."""
    return world.submit(
        [START, *delivered], count, encoder_token_ids=prompt, num_delivered_tokens=len(delivered), **params
    )


async def answered(world: World, prompt: list[int], count: int, *more: Any, **params: Any) -> Request:
    """The same, read to its end: the texts must be the right ones."""
    request = ask(world, prompt, count, *more, **params)
    await read_right(request)
    return request


def counts(request: Request) -> tuple[int, int, int]:
    """Tokens of the prompt, cached and generated ones, as its reader sees them."""
    usage = request.usage()
    return usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_generated_tokens


def inputs(seed: int, count: int, most: int = 60) -> list[list[int]]:
    """Inputs of the encoder, each twice."""
    rng = random.Random(seed)
    some = [[rng.randrange(1000) for _ in range(rng.randint(1, most))] for _ in range(count)]
    return some + some


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_every_text_is_right_in_a_mixed_batch(block_size: int, budget: int, prefix_caching: bool) -> None:
    prompts = inputs(block_size + budget, 12)
    world = world_with(
        block_size=block_size,
        num_unit_blocks=3000 // block_size,
        num_blocks=3000 // block_size,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
    )
    async with world.running():
        for _ in range(2):
            await asyncio.gather(*(answered(world, prompt, 12) for prompt in prompts))
        num_tokens = sum(map(len, prompts))
        assert world.model.num_encoded == (num_tokens // 2 if prefix_caching else 2 * num_tokens)


async def test_the_prompt_is_what_the_encoder_gets_and_what_usage_counts() -> None:
    async with world_with().running() as world:
        cold, warm = [await answered(world, list(range(30)), 5) for _ in range(2)]
        assert [counts(one) for one in (cold, warm)] == [(30, 0, 5), (30, 30, 5)]
        assert world.model.num_forwarded == 2 * 5, "the start token, and all generated tokens but the last"
        assert world.engine.stats.num_forwarded_tokens == 30 + 10
        assert (world.manager.sessions[0].num_prompt_tokens, world.manager.sessions[0].num_cached_tokens) == (62, 30)


async def test_different_salts_share_no_encoder() -> None:
    async with world_with().running() as world:
        for salt in ("a", "b"):
            await answered(world, list(range(20)), 3, tenant_salt=salt)
        assert world.model.num_encoded == 40


async def test_what_was_delivered_is_the_beginning_of_the_decoders_text() -> None:
    """As when a stream goes on on another worker, which has neither the encoder's output nor the text."""
    prompt = list(range(50))
    whole = expected_text([START], 30, encoder_tokens=prompt)
    async with world_with().running() as world:
        request = await answered(world, prompt, 20, tuple(whole[:10]))
        assert counts(request) == (60, 0, 20), "the prompt of an attempt is what it states"
        again = await answered(world, prompt, 20, tuple(whole[:10]))
        assert again.sequence.num_cached_tokens == 8
        assert world.model.num_forwarded < 2 * (11 + 19), "the decoder's prefix of the first request was a hit"


async def test_a_preempted_request_goes_on_with_its_unit() -> None:
    """The decoder's pool is too small for all: the last in rank is computed again, and its encoder is not."""
    world = world_with(num_blocks=20, max_num_seqs=4, reserve_seconds=0.0)
    prompts = [list(range(10 * i, 10 * i + 9)) for i in range(4)]
    async with world.running():
        async with in_lockstep(world.engine, len(prompts)):
            await asyncio.gather(*(answered(world, prompt, 40) for prompt in prompts))
        assert world.engine.scheduler.num_preemptions > 0
        assert world.model.num_encoded == 4 * 9


async def test_units_wait_for_room_and_nobody_starves() -> None:
    world = world_with(num_unit_blocks=11, max_num_seqs=8)
    prompts = inputs(5, 10, most=40)
    async with world.running():
        await asyncio.gather(*(answered(world, prompt, 6) for prompt in prompts))
        assert world.engine.scheduler.num_preemptions == 0


async def test_at_most_one_encoder_beyond_the_budget_is_in_a_step() -> None:
    """So that decodes are slowed by one input, however many wait."""
    async with world_with(max_num_seqs=8, max_num_batched_tokens=64).running() as world:
        largest: list[int] = []
        execute = world.model.execute

        def watched(step: Any) -> Any:
            largest.append(sum(len(part.encoder.token_ids) for part in step.parts))
            return execute(step)

        world.model.execute = watched  # type: ignore[method-assign]
        await asyncio.gather(*(answered(world, list(range(i, i + 50)), 4) for i in range(8)))
        assert max(largest) == 50


FULL = {"max_model_len": 12}


@pytest.mark.parametrize(
    ("limits", "asked", "words"),
    [
        ({}, ([1] * 257, 3), "257 tokens are more than the encoder takes on this worker, which is 256"),
        ({}, ([1000], 3), "token id 1000 is outside the encoder's vocabulary of 1000"),
        ({}, ([], 3), "at least one token for the encoder"),
        (FULL, ([1, 2], 12), "1 tokens at the beginning of the decoder's text and 12 new ones exceed"),
        (FULL, ([1, 2], 1, tuple(range(11))), "12 tokens leave no room to generate"),
        ({"num_unit_blocks": 0, "encoder": None}, ([1, 2], 3), "has no encoder"),
        (
            {"num_unit_blocks": 9},
            ([1] * 33, 3),
            "33 prompt tokens need 9 blocks of 4 for the encoder's output; this worker has 8",
        ),
    ],
)
async def test_what_does_not_fit_is_refused_with_the_figures(
    limits: dict[str, Any], asked: tuple[Any, ...], words: str
) -> None:
    async with world_with(**limits).running() as world:
        with pytest.raises(EngineError, match=words) as caught:
            ask(world, *asked)
    assert caught.value.kind is (ErrorKind.NEVER_FITS if " need " in words else ErrorKind.INVALID)


async def test_without_a_limit_a_text_is_as_long_as_the_decoder_takes() -> None:
    async with world_with(**FULL).running() as world:
        assert len(await read(ask(world, [1, 2], 0))) == 11


# -- the worker's edge


PROMPTS = PromptEncoder(None, 16, EncoderSettings(8, 1000, (START, 7)))


def request_of(*ids: int, **fields: Any) -> worker_pb2.GenerateRequest:
    """As a client sends it."""
    return worker_pb2.GenerateRequest(sequence_id="s", attempt=1, token_ids=worker_pb2.TokenIds(ids=ids), **fields)


def test_a_prompt_is_split_at_what_was_delivered() -> None:
    request = request_of(5, 6, 8, 9, num_delivered_tokens=1)
    check_generate(request, PROMPTS, "f")
    params = decode_generate(request, PROMPTS)
    assert (params.encoder_token_ids, params.token_ids, params.num_delivered_tokens) == ([5, 6, 8], [START, 7, 9], 1)
    assert params.num_prompt_tokens == 4


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_logprobs": 0}])
def test_what_shows_the_prompt_in_the_answer_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="feeds its encoder") as caught:
        check_generate(request_of(5, **fields), PROMPTS, "f")
    assert caught.value.field in fields


def test_delivered_tokens_do_not_count_towards_the_encoders_input() -> None:
    check_generate(request_of(*range(12), num_delivered_tokens=4), PROMPTS, "f")
    with pytest.raises(EngineError, match="9 tokens are more than the encoder takes"):
        check_generate(request_of(*range(12), num_delivered_tokens=3), PROMPTS, "f")
    with pytest.raises(EngineError, match="leave no room"):
        check_generate(request_of(*range(20), num_delivered_tokens=14), PROMPTS, "f")


def test_as_many_ids_are_read_as_a_request_may_state() -> None:
    assert (PROMPTS.max_ids, PromptEncoder(None, 16).max_ids) == (24, 16)


# -- several answers


@pytest.mark.parametrize(("num_blocks", "num_unit_blocks"), [(400, 400), (8, 11)], ids=["at once", "one after another"])
async def test_several_answers_run_the_encoder_once(num_blocks: int, num_unit_blocks: int) -> None:
    """Also where they do not fit together."""
    world = world_with(num_blocks=num_blocks, num_unit_blocks=num_unit_blocks)
    prompt = list(range(1, 40))
    async with world.running():
        await answered(world, prompt, 20, **several(4))
        assert world.model.num_encoded == len(prompt)


@pytest.mark.parametrize("num_blocks", [400, 12])
async def test_beams_share_the_unit_and_keep_it_when_they_are_preempted(num_blocks: int) -> None:
    """Their common beginning is then computed again: as much as they have generated, however long the prompt is."""
    async with world_with(num_blocks=num_blocks, num_unit_blocks=24).running() as world:
        await read_right(*(ask(world, prompt, 10, **searching(3, 2)) for prompt in inputs(5, 4, most=20)))
        assert (world.engine.scheduler.num_preemptions > 0) == (num_blocks < 400)
