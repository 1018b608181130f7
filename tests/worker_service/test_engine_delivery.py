"""Tokens reach their readers while the next step runs, and a text that turns out to have ended leaves nothing behind. Few chunks
wait, and none is lost, however slowly they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from kvpool.v1 import worker_pb2
from kvpool.worker_service.engine.detokenizer import TextDecoder
from kvpool.worker_service.engine.errors import ErrorKind
from kvpool.worker_service.engine.request import Request
from kvpool.worker_service.engine.stream import MAX_CHUNK_TOKENS, EndReason, StreamChunk, TokenStream
from kvpool.worker_service.step import RowLogprobs, SampledToken
from tests.tracer import VOCAB_SIZE, expected_text
from tests.worker_service.world import World, failed, read, read_right

PROMPT = [1, 2, 3]


@pytest.fixture
def tokenizer() -> Tokenizer:
    """One word per token."""
    return Tokenizer(models.WordLevel({f"w{token}.": token for token in range(VOCAB_SIZE)}, unk_token="w0."))


def noted(order: list[str], what: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def noting(*arguments: Any) -> Any:
        order.append(what)
        return call(*arguments)

    return noting


async def test_tokens_are_passed_on_after_the_next_step_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(num_blocks=100, block_size=4)
    order: list[str] = []
    thread = world.engine._model_thread
    monkeypatch.setattr(thread, "submit", noted(order, "launch", thread.submit))
    monkeypatch.setattr(Request, "deliver", noted(order, "deliver", Request.deliver))
    async with world.running():
        await read_right(world.submit(PROMPT, 3))
    assert order == ["launch", "launch", "deliver", "launch", "deliver", "deliver"]


async def test_no_step_is_computed_after_the_last_token_or_an_id_that_ends_the_text() -> None:
    text = expected_text(PROMPT, 9)
    async with World(num_blocks=100, block_size=4).running() as world:
        await read_right(world.submit(PROMPT, 9))
        assert world.model.num_steps == 9
        ended = world.submit(PROMPT, 9, stop_token_ids=frozenset({text[4]}))
        first = text.index(text[4])
        assert await read(ended) == text[:first]
        assert ended.finish_reason is EndReason.STOP
        assert world.model.num_steps == 9 + first + 1


@pytest.mark.parametrize("num_tokens", [1, 4, 9])
async def test_a_stop_string_ends_a_request_whose_next_step_runs(tokenizer: Tokenizer, num_tokens: int) -> None:
    """The token of that step reaches nobody, its blocks come back, and others have their texts."""
    text = expected_text(PROMPT, 9)
    world = World(num_blocks=100, block_size=4)
    world.engine.tokenizer = tokenizer
    async with world.running():
        others = [world.submit([number, 5], 12) for number in range(3)]
        stopped = world.submit(PROMPT, 9, stop_strings=(f"w{text[num_tokens - 1]}.",))
        first = text.index(text[num_tokens - 1])
        assert await read(stopped) == text[: first + 1]
        assert stopped.finish_reason is EndReason.STOP
        assert stopped.usage().num_generated_tokens == first + 1
        await read_right(*others)
    assert world.engine.stats.ended == {"stop": 1, "length": 3}


@pytest.mark.parametrize("num_tokens", [2, 3])
async def test_a_token_that_cannot_be_decoded_ends_its_request_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """Also if it is the last one, after which the request runs no longer."""
    text = expected_text(PROMPT, 3)
    add = TextDecoder.add

    def broken(decoder: TextDecoder, token_id: int) -> str:
        if token_id == text[num_tokens - 1]:
            raise ValueError("no such token")
        return add(decoder, token_id)

    monkeypatch.setattr(TextDecoder, "add", broken)
    world = World(num_blocks=100, block_size=4)
    world.engine.tokenizer = tokenizer
    async with world.running():
        tokens, error = await failed(world.submit(PROMPT, 3))
        assert tokens == text[: num_tokens - 1]
        assert error.kind is ErrorKind.INTERNAL
    assert world.engine.stats.ended == {"internal": 1}


# -- chunks that wait


async def test_a_chunk_grows_no_larger_than_a_message_may() -> None:
    """However long nobody reads; each chunk has the text of its tokens, so that one of them alone can be delivered."""
    stream, count = TokenStream(), 2 * MAX_CHUNK_TOKENS + 3
    for index in range(count):
        last = EndReason.LENGTH if index == count - 1 else None
        stream.put(StreamChunk(index, [SampledToken(index)], chr(ord("a") + index % 26), finish_reason=last))
    chunks = []
    while (chunk := await stream.get()) is not None:
        chunks.append(chunk)
    assert [chunk.start_index for chunk in chunks] == [0, MAX_CHUNK_TOKENS, 2 * MAX_CHUNK_TOKENS]
    for chunk in chunks:
        assert len(chunk.tokens) == len(chunk.text) <= MAX_CHUNK_TOKENS
        assert [token.token_id for token in chunk.tokens] == list(
            range(chunk.start_index, chunk.start_index + len(chunk.tokens))
        )
    assert [chunk.finish_reason for chunk in chunks] == [None, None, EndReason.LENGTH]


def test_a_chunk_that_follows_one_that_waits_adds_all_that_it_says() -> None:
    """A slow reader misses nothing: values of the prompt's tokens, what was used by then, how the answer ended, and its score."""
    stream = TokenStream()
    first, second = worker_pb2.Usage(num_generated_tokens=1), worker_pb2.Usage(num_generated_tokens=2)
    stream.put(StreamChunk(0, [SampledToken(7, None)], "a", first, prompt_logprobs=[None]))
    stream.put(StreamChunk(1, [SampledToken(8, None)], "b", second, prompt_logprobs=[RowLogprobs(-1.0, [])]))
    stream.put(StreamChunk(2, text="c", finish_reason=EndReason.STOP, score=-3.5))
    assert stream.take() == StreamChunk(
        0,
        [SampledToken(7, None), SampledToken(8, None)],
        "abc",
        second,
        EndReason.STOP,
        [None, RowLogprobs(-1.0, [])],
        score=-3.5,
    )
    assert stream.is_read


def test_answers_wait_apart_and_the_stream_ends_with_the_last_of_them() -> None:
    stream = TokenStream(2)
    stream.put(StreamChunk(0, text="a"))
    stream.put(StreamChunk(0, text="x", index=1))
    stream.put(StreamChunk(0, text="b", finish_reason=EndReason.STOP))
    assert not stream.is_finished
    taken = [stream.take(), stream.take()]
    assert [(chunk.index, chunk.text) for chunk in taken if chunk is not None] == [(0, "ab"), (1, "x")]
    assert not stream.is_read
    stream.put(StreamChunk(1, text="y", index=1, finish_reason=EndReason.LENGTH))
    assert stream.is_finished
    last = stream.take()
    assert last is not None
    assert (last.index, last.text, stream.is_read) == (1, "y", True)
