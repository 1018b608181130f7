"""Merges the streams of several answers, each of which continues by itself, into one sequence of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from .chunk import Chunk


class ChunkStream(Protocol):
    async def next_chunk(self) -> Chunk | None:
        """Wait for the next one; None after the last."""
        ...

    async def aclose(self) -> None:
        """End the stream. May be repeated."""
        ...


class MergedStreams:
    """Reads all streams at once, and at most one chunk of each ahead."""

    def __init__(self, streams: Sequence[ChunkStream]) -> None:
        """Begin to read. Needs a running event loop."""
        self._streams = streams
        self._reading: dict[asyncio.Task[Chunk | None], int] = {}
        """Reads that are under way, each with the index of its stream."""
        for index in range(len(streams)):
            self._read(index)

    def _read(self, index: int) -> None:
        self._reading[asyncio.create_task(self._streams[index].next_chunk())] = index

    async def next_chunk(self) -> tuple[int, Chunk] | None:
        """Wait for the next chunk of any stream, and return it with the stream's index; None after the last of all. Raises what one
        of them raises."""
        while self._reading:
            done, _ = await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
            # The one that was read longest ago: a set has them in no order.
            task = next(task for task in self._reading if task in done)
            index = self._reading.pop(task)
            chunk = task.result()
            if chunk is not None:
                self._read(index)
                return index, chunk
        return None

    async def aclose(self) -> None:
        """End all streams. May be repeated."""
        reading, self._reading = self._reading, {}
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for index in reading.values():
            await self._streams[index].aclose()
