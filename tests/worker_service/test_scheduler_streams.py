"""Tokens on their way to a reader: few chunks wait, and none is lost, however slowly it is read."""

from __future__ import annotations

from kvpool.v1 import worker_pb2
from kvpool.worker_service.engine.stream import MAX_CHUNK_TOKENS, EndReason, StreamChunk, TokenStream
from kvpool.worker_service.step import RowLogprobs, SampledToken


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
