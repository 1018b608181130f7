"""Merges the streams of several answers, each of which continues by itself, into one sequence of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from .chunk import Chunk


class ChunkStream(Protocol):
    """The chunks of one answer."""

    async def next_chunk(self) -> Chunk | None:
        """Wait for the next one; None after the last."""
        ...

    async def aclose(self) -> None:
        """End the stream. May be repeated."""
        ...


class MergedStreams:
    """Reads all streams at once, and at most one chunk of each ahead."""

    def __init__(self, streams: Iterable[ChunkStream]) -> None:
        """Begin to read. Needs a running event loop."""
        self._reading: dict[asyncio.Task[Chunk | None], ChunkStream] = {}
        for stream in streams:
            self._read(stream)

    def _read(self, stream: ChunkStream) -> None:
        self._reading[asyncio.create_task(stream.next_chunk())] = stream

    async def next_chunk(self) -> Chunk | None:
        """Wait for the next chunk of any stream; None after the last of all. Raises what one of them raises."""
        while self._reading:
            done, _ = await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
            # The one that was read longest ago: a set has them in no order.
            task = next(task for task in self._reading if task in done)
            stream = self._reading.pop(task)
            chunk = task.result()
            if chunk is not None:
                self._read(stream)
                return chunk
        return None

    async def aclose(self) -> None:
        """End all streams. May be repeated."""
        reading, self._reading = self._reading, {}
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for stream in reading.values():
            await stream.aclose()
