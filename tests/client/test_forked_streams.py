"""Answers that go on by themselves, read as one stream."""

from __future__ import annotations

from typing import cast

from kvpool.client.chunk import Chunk
from kvpool.client.forked_streams import MergedStreams

NUM_STREAMS = 8
NUM_CHUNKS = 5


class _Ready:
    """An answer whose chunks are there already; each is its number."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._num_left = NUM_CHUNKS

    async def next_chunk(self) -> Chunk | None:
        if not self._num_left:
            return None
        self._num_left -= 1
        return cast(Chunk, self._number)

    async def aclose(self) -> None:
        raise AssertionError("all are read to their ends")


async def test_answers_that_are_ready_take_turns() -> None:
    """None of them is read again before each of the others."""
    merged = MergedStreams([_Ready(number) for number in range(NUM_STREAMS)])
    found = []
    while (chunk := await merged.next_chunk()) is not None:
        index, number = chunk
        assert index == cast(int, number)
        found.append(index)
    assert found == list(range(NUM_STREAMS)) * NUM_CHUNKS
    await merged.aclose()
