"""Several answers to one prompt: each is complete, whichever workers it takes."""

from __future__ import annotations

import asyncio
from itertools import chain, zip_longest
from typing import Any, cast

import pytest

from kvpool.client import Chunk, Completion, InvalidRequest, SyncClient, Unavailable
from kvpool.client.forked_streams import MergedStreams
from kvpool.v1 import worker_pb2
from tests.client.clients import joined, quick
from tests.client.fakes import UNAVAILABLE, Answering, FakeWorker, fake_cluster, usage
from tests.client.words import WORDS

PROMPT = (1, 5, 6)
SEED = 2**64 - 2
"""The seeds of further answers begin at 0 again."""


def text_of(seed: int) -> tuple[int, ...]:
    """The one right answer with that seed: 2 to 6 tokens."""
    return tuple(5 + (seed * 3 + place * place) % 6 for place in range(2 + seed % 5))


def pieces_of(request: worker_pb2.GenerateRequest, index: int) -> list[worker_pb2.GenerateResponse]:
    """What is left of an answer: one message per token, the last of which ends it."""
    first, text = request.num_delivered_tokens, text_of((request.sampling.seed + index) % 2**64)
    pieces = [
        worker_pb2.GenerateResponse(
            index=index, start_index=place - first, token_ids=[text[place]], text=f" {WORDS[text[place]]}"
        )
        for place in range(first, len(text))
    ]
    num_prompt = len(request.token_ids.ids)
    pieces[0].usage.CopyFrom(usage(num_prompt, num_cached=4))
    pieces[-1].usage.CopyFrom(usage(num_prompt, num_cached=4, num_generated=len(text) - first))
    pieces[-1].finish_reason = worker_pb2.FINISH_REASON_STOP
    return pieces


class ManyAnswers(FakeWorker):
    """Answers every request rightly, its answers a token at a time in turns; breaks off after so many messages of a request."""

    def __init__(self, worker_id: str, *breaks_after: int | None) -> None:
        super().__init__(worker_id)
        self.breaks_after = [*breaks_after]

    async def _answer(self, request: worker_pb2.GenerateRequest) -> Answering:
        most = self.breaks_after.pop(0) if self.breaks_after else None
        answers = [pieces_of(request, index) for index in range(max(1, request.n))]
        if request.beam_search.num_beams > 1:  # all of a text together, when the search has ended
            messages = list(chain.from_iterable(answers))
        else:
            messages = [piece for turn in zip_longest(*answers) for piece in turn if piece is not None]
        for message in messages[:most]:
            yield message
        if most is not None:
            yield UNAVAILABLE


def check(chunks: list[Chunk], completions: list[Completion], n: int) -> None:
    """All answers are there, once, in order, and complete."""
    assert len(completions) == n
    for index, completion in enumerate(completions):
        assert completion.token_ids == text_of((SEED + index) % 2**64)
        assert (completion.token_ids, completion.text) == joined([chunk for chunk in chunks if chunk.index == index])
        assert (completion.num_prompt_tokens, completion.num_cached_tokens) == (len(PROMPT), 4)


async def ask(*workers: FakeWorker, **options: Any) -> tuple[list[Chunk], list[Completion]]:
    async with fake_cluster(*workers) as manager, quick(manager) as client:
        stream = client.generate(PROMPT, seed=SEED, **{"temperature": 1.0, **options})
        chunks = [chunk async for chunk in stream]
        return chunks, await stream.collect_all()


@pytest.mark.parametrize("n", [1, 2, 5])
async def test_all_answers_come_over_one_request(n: int) -> None:
    worker = ManyAnswers("w")
    check(*await ask(worker, n=n), n)
    (request,) = worker.requests
    assert (request.n, request.sampling.seed) == (n, SEED)
    assert worker.num_live == 0


@pytest.mark.parametrize("num_messages", range(1, 13))
async def test_each_answer_goes_on_by_itself_after_any_token(num_messages: int) -> None:
    n = 4
    first, second = ManyAnswers("w1", num_messages), ManyAnswers("w2")
    chunks, completions = await ask(first, second, n=n)
    check(chunks, completions, n)
    (one,) = first.requests
    delivered = {index: [c for c in chunks if c.index == index and c.worker_id == "w1"] for index in range(n)}
    ended = {index for index, own in delivered.items() if own and own[-1].finish_reason is not None}
    assert len(second.requests) == n - len(ended)
    for request in second.requests:
        index = (request.sampling.seed - SEED) % 2**64
        tokens = [token_id for chunk in delivered[index] for token_id in chunk.token_ids]
        assert index not in ended
        assert request.sequence_id == (f"{one.sequence_id}.{index}" if index else one.sequence_id)
        assert (request.n, request.attempt, request.num_delivered_tokens) == (0, 2, len(tokens))
        assert list(request.token_ids.ids) == [*PROMPT, *tokens]


async def test_a_request_without_a_token_begins_again_as_one() -> None:
    first, second = ManyAnswers("w1", 0), ManyAnswers("w2")
    check(*await ask(first, second, n=3), 3)
    assert [(request.n, request.attempt) for request in (*first.requests, *second.requests)] == [(3, 1), (3, 2)]


async def test_answers_may_move_more_than_once() -> None:
    first, second = ManyAnswers("w1", 4, 1, 1), ManyAnswers("w2", 1, 1, 2, 1)
    check(*await ask(first, second, n=3), 3)


async def test_an_answer_that_cannot_go_on_ends_them_all() -> None:
    first, second = ManyAnswers("w1", 5, *[0] * 50), ManyAnswers("w2", 1, *[0] * 50)
    with pytest.raises(Unavailable, match="broke off after"):
        await ask(first, second, n=4)
    assert first.num_live == second.num_live == 0


@pytest.mark.parametrize("num_messages", [1, 4, 8])
async def test_texts_of_a_search_are_delivered_all_or_not_at_all(num_messages: int) -> None:
    first, second = ManyAnswers("w1", num_messages), ManyAnswers("w2")
    search = {"num_beams": 4, "length_penalty": 0.5, "early_stopping": "never", "temperature": 0.0}
    chunks, completions = await ask(first, second, n=3, **search)
    check(chunks, completions, 3)
    assert {chunk.worker_id for chunk in chunks} == {"w2"}
    for request in (*first.requests, *second.requests):
        asked = request.beam_search
        assert (request.n, asked.num_beams, asked.length_penalty) == (3, 4, 0.5)
        assert asked.early_stopping == worker_pb2.EARLY_STOPPING_NEVER


async def test_collect_gives_the_first_answer_and_collect_all_all_of_them() -> None:
    async with fake_cluster(ManyAnswers("w")) as manager:

        def run() -> list[Completion]:
            with SyncClient(manager.address) as client:
                first = client.generate(PROMPT, n=3, temperature=1.0, seed=7).collect()
                return [first, *client.generate(PROMPT, n=3, temperature=1.0, seed=7).collect_all()]

        assert [one.token_ids for one in await asyncio.to_thread(run)] == [text_of(seed) for seed in (7, 7, 8, 9)]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"n": 0}, "n must be at least 1"),
        ({"n": 129}, "n must be at most 128"),
        ({"num_beams": 0}, "num_beams must be at least 1"),
        ({"num_beams": 65}, "num_beams must be at most 64"),
        ({"num_beams": 3, "n": 4}, "n must be at most num_beams"),
        ({"num_beams": 2, "temperature": 1.0}, "temperature must be 0 with num_beams"),
        ({"length_penalty": 2.0}, "num_beams must be 2 or more with length_penalty"),
        ({"num_beams": 2, "length_penalty": 6.5}, "length_penalty must be a number in"),
        ({"num_beams": 2, "early_stopping": "always"}, "early_stopping must be True, False or"),
        ({"num_beams": 2, "early_stopping": 7}, "early_stopping must be"),
    ],
)
async def test_options_that_make_no_sense_are_named(options: dict[str, Any], complaint: str) -> None:
    async with fake_cluster(ManyAnswers("w")) as manager, quick(manager) as client:
        with pytest.raises(InvalidRequest, match=complaint):
            client.generate(PROMPT, **options)


class _Ready:
    """An answer of two chunks that are there already; each is its number."""

    def __init__(self, number: int) -> None:
        self._chunks = [cast(Chunk, number)] * 2

    async def next_chunk(self) -> Chunk | None:
        return self._chunks.pop() if self._chunks else None

    async def aclose(self) -> None:
        raise AssertionError("all are read to their ends")


async def test_answers_that_are_ready_take_turns() -> None:
    merged = MergedStreams([_Ready(number) for number in range(8)])
    taken: list[tuple[int, object]] = []
    while (chunk := await merged.next_chunk()) is not None:
        taken.append(chunk)
    assert taken == [(number, number) for number in range(8)] * 2
    await merged.aclose()
