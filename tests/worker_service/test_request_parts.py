"""What a request asks of each step: prompts told of once, tokens counted, ends held back, however it is chunked and preempted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.v1 import common_pb2
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from kvpool.worker_service.engine.errors import EngineError
from kvpool.worker_service.engine.request import GenerationParams, Request
from kvpool.worker_service.step import RowLogprobs, SampledToken, SamplingParams
from tests.tracer import VOCAB_SIZE
from tests.worker_service.scheduler_world import SchedulerWorld
from tests.worker_service.world import World, read

STOPS = frozenset({7, 8})
PENALTY = SamplingParams(presence_penalty=1.0)


def request(prompt: list[int], **params: Any) -> Request:
    sequence = CacheSequence("s", 1, common_pb2.Root(), prompt, max_new_tokens=50)
    sequence.tables = ([],)
    return Request(GenerationParams("s", 1, prompt, **params), sequence, 50, STOPS, None)


@given(
    prompt=st.lists(st.integers(0, 99), min_size=1, max_size=30),
    chunks=st.lists(st.integers(1, 12), min_size=1, max_size=40),
    preempted=st.sets(st.integers(0, 39), max_size=4),
)
async def test_each_token_of_a_prompt_is_told_of_once(
    prompt: list[int], chunks: list[int], preempted: set[int]
) -> None:
    """By the row of the token before it, whatever the chunks, and however often all of it is computed again."""
    asked = request(prompt, num_prompt_logprobs=3)
    asked.on_granted()
    told: list[int] = []
    for index, size in enumerate(chunks):
        if index in preempted:
            asked.sequence = asked.sequence.next_round()
            asked.sequence.tables = ([],)
        sequence = asked.sequence
        num_tokens = min(size, len(prompt) - sequence.num_computed_tokens)
        if not num_tokens:
            break
        part = asked.part(asked.sequence, num_tokens, samples=False)
        rows = part.prompt_rows
        if rows is not None:
            assert rows.num_top == 3
            assert 0 <= rows.first <= rows.first + len(rows.targets) <= num_tokens
            behind = part.start + rows.first + 1
            assert rows.targets == prompt[behind : behind + len(rows.targets)]
            told += rows.targets
            asked.on_prompt_logprobs([RowLogprobs(-float(target), []) for target in rows.targets])
        sequence.num_computed_tokens += num_tokens
        # Nothing that could be told is left behind.
        assert len(told) >= min(sequence.num_computed_tokens, len(prompt) - 1)
    assert told == prompt[1 : 1 + len(told)]
    chunk = await asked.stream.get()
    assert chunk is not None
    assert chunk.prompt_logprobs == [None, *(RowLogprobs(-float(token), []) for token in told)]


def test_nothing_is_told_of_a_prompt_that_nobody_asks_about() -> None:
    for asked in (request([1, 2, 3]), request([1, 2, 3], num_prompt_logprobs=0, num_delivered_tokens=1)):
        asked.on_granted()
        assert asked.part(asked.sequence, 3, samples=True).prompt_rows is None


def test_delivered_tokens_count_as_generated() -> None:
    """A penalty of the answer's tokens must not change when the stream moves."""
    moved = request([1, 2, 5, 6, 5], num_delivered_tokens=3, sampling=PENALTY)
    whole = request([1, 2], sampling=PENALTY)
    for token in (5, 6, 5):
        whole.take(SampledToken(token))
    for asked in (moved, whole):
        counts = asked.part(asked.sequence, 1, samples=True).counts
        assert counts is not None
        assert counts.ids.tolist() == [1, 2, 5, 6]
        assert counts.num_generated.tolist() == [0, 0, 2, 1]
    plain = request([1, 2])
    assert plain.part(plain.sequence, 1, samples=True).counts is None


@pytest.mark.parametrize("num_delivered", [0, 2])
def test_what_ends_a_text_is_banned_before_min_tokens(num_delivered: int) -> None:
    """Delivered tokens are tokens of the text."""
    prompt = [1, 2, *[3] * num_delivered]
    asked = request(prompt, num_delivered_tokens=num_delivered, min_tokens=4)
    banned = []
    for _ in range(6 - num_delivered):
        banned.append(asked.part(asked.sequence, 1, samples=True).banned_ids)
        asked.take(SampledToken(9))
    assert banned == [STOPS] * (4 - num_delivered) + [()] * 2


async def test_whoever_asks_about_a_prompt_gets_no_hits_and_gives_them() -> None:
    """Hits have no logits. What is computed for it serves the next one."""
    prompt = list(range(40))
    async with World(num_blocks=64, block_size=4).running() as world:
        await world.answered(prompt, 2)
        asked = world.submit(prompt, 2, num_prompt_logprobs=0)
        await read(asked)
        assert asked.num_cached_tokens == 0
        moved = world.submit(prompt, 2, num_prompt_logprobs=0, num_delivered_tokens=4)
        await read(moved)
        assert moved.num_cached_tokens > 0


def resumed(**params: Any) -> Request:
    """A request that was preempted next to a long text, and has its blocks again."""
    world = SchedulerWorld(num_blocks=13, max_num_seqs=2)
    world.submit(4, 40)
    request = world.submit(12, 40, **params)
    while not (request.num_preemptions and request.sequence.state is SequenceState.LIVE):
        world.turns()
    return request


def test_a_preempted_request_reports_the_cached_tokens_of_its_first_round() -> None:
    """Its later rounds hit its own blocks, which is no saving of the prompt."""
    request = resumed()
    assert request.sequence.num_cached_tokens > 0
    assert request.usage().num_cached_tokens == 0


def test_prompt_logprobs_take_no_hits_in_later_rounds_either() -> None:
    """Rows that are not computed have no logits, so a prompt must not be skipped after a preemption."""
    assert resumed(num_prompt_logprobs=0).sequence.num_cached_tokens == 0


async def test_no_more_tokens_are_asked_for_than_can_come() -> None:
    """An answer whose every id ends it has none of them."""
    async with World(num_blocks=64, block_size=4).running() as world:
        with pytest.raises(EngineError) as caught:
            world.submit([1, 2], 8, min_tokens=1, stop_token_ids=frozenset(range(VOCAB_SIZE)))
        assert caught.value.field == "stop.min_tokens"
        # As many as were delivered and may come are not too many.
        await world.answered([1, 2, 3], 2, min_tokens=3, num_delivered_tokens=1)
