"""The tokens of one request on their way to its reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvpool.v1 import worker_pb2

from ..step import RowLogprobs, SampledToken
from .errors import EngineError

MAX_CHUNK_TOKENS: Final = 256
"""Tokens in one chunk, which is one message: with 20 log-probabilities each, about one HTTP/2 flow-control window."""


class EndReason(Enum):
    """Why a text ended, by its number in messages."""

    STOP = worker_pb2.FINISH_REASON_STOP
    LENGTH = worker_pb2.FINISH_REASON_LENGTH


@dataclass(slots=True)
class StreamChunk:
    """Tokens and text since the previous chunk."""

    start_index: int
    tokens: list[SampledToken] = field(default_factory=list)
    text: str = ""
    usage: worker_pb2.Usage | None = None
    finish_reason: EndReason | None = None
    prompt_logprobs: list[RowLogprobs | None] = field(default_factory=list)
    """Log-probabilities of the prompt's next tokens; None for its first, which has no context."""
    index: int = 0
    """Index of the answer that it is a piece of."""
    score: float | None = None
    """Score of a text that beam search has found, in its last chunk; None in any other."""

    def merge(self, later: StreamChunk) -> None:
        """Append the chunk of the same answer that follows this one."""
        self.tokens += later.tokens
        self.text += later.text
        self.usage = later.usage or self.usage
        self.finish_reason = later.finish_reason
        self.score = later.score
        self.prompt_logprobs += later.prompt_logprobs


class TokenStream:
    """A queue for one reader that coalesces: a slow reader gets fewer, larger chunks, up to MAX_CHUNK_TOKENS. Each answer's chunks
    are in order; those of other answers are between them."""

    def __init__(self, num_answers: int = 1) -> None:
        self._pending: deque[StreamChunk] = deque()
        self._last: dict[int, StreamChunk] = {}
        """The last pending chunk of each answer."""
        self._num_unfinished = num_answers
        self._error: EngineError | None = None
        self._changed = asyncio.Event()
        self._on_change: Callable[[], None] | None = None
        self.is_finished = False

    def put(self, chunk: StreamChunk) -> None:
        """Append a chunk. None of its answer may follow a chunk with a finish reason."""
        assert not self.is_finished
        last = self._last.get(chunk.index)
        if last is not None and len(last.tokens) + len(chunk.tokens) <= MAX_CHUNK_TOKENS:
            last.merge(chunk)
        else:
            self._pending.append(chunk)
            self._last[chunk.index] = chunk
        if chunk.finish_reason is not None:
            self._num_unfinished -= 1
            self.is_finished = not self._num_unfinished
        self._note_change()

    def fail(self, error: EngineError) -> None:
        """End the stream with an error after the chunks put before. No effect if it has ended."""
        if not self.is_finished:
            self._end(error)

    def give_up(self, error: EngineError) -> None:
        """Replace all that is unread, the end of the stream included, by an error."""
        if self._error is None:
            self._pending.clear()
            self._last.clear()
            self._end(error)

    def _end(self, error: EngineError) -> None:
        self._error = error
        self.is_finished = True
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        if self._on_change is not None:
            self._on_change()

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` whenever there may be something to take; the first time now. For a reader of many streams."""
        self._on_change = on_change
        on_change()

    def take(self) -> StreamChunk | None:
        """The next chunk; None if there is none, now or ever (`is_finished`). Raises EngineError if the stream failed."""
        if self._pending:
            chunk = self._pending.popleft()
            if self._last[chunk.index] is chunk:
                del self._last[chunk.index]
            return chunk
        if self._error is not None:
            raise self._error
        return None

    async def get(self) -> StreamChunk | None:
        """Wait for the next chunk; None at the end. Raises EngineError if the stream failed."""
        while (chunk := self.take()) is None and not self.is_finished:
            self._changed.clear()
            await self._changed.wait()
        return chunk

    @property
    def has_unread(self) -> bool:
        """Whether a chunk waits to be taken."""
        return bool(self._pending)

    @property
    def is_read(self) -> bool:
        """Whether all answers are complete and all chunks were taken."""
        return not self._num_unfinished and not self._pending and self._error is None
