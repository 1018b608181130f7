"""The answers of one request to one or more prompts, as pieces in the order in which they are computed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import NamedTuple, Self

from kvpool.client import Chunk, Completion, GenerateStream, KvpoolError, Model
from kvpool.client.forked_streams import MergedStreams

from ..context import Gateway
from ..errors import ApiError
from ..request_log import AnswerRecord


class GenerationPiece(NamedTuple):
    """The next chunk of one answer."""

    choice: int
    chunk: Chunk


class GenerationStreams:
    """Merges streams into one sequence of pieces. Use it with `async with`: leaving it ends the streams that still run, and frees
    their blocks."""

    def __init__(self, gateway: Gateway, streams: Sequence[GenerateStream], *, request_id: str) -> None:
        """`streams` has one for each prompt, all with the same number of answers n. Answer k to prompt p is the choice p · n +
        k."""
        self._gateway = gateway
        self._request_id = request_id
        self._records: list[AnswerRecord] = []
        self._streams = streams
        self.num_per_prompt = streams[0].num_answers
        self.num_choices = self.num_per_prompt * len(streams)
        self._began = time.monotonic()
        self._first: GenerationPiece | None = None
        self._has_token = False
        self._pieces = self._read()

    async def __aenter__(self) -> Self:
        metrics, most = self._gateway.metrics, self._gateway.settings.max_streams
        if metrics.open_streams + self.num_choices > most:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{metrics.open_streams} answers are being generated, this gateway takes {most} (--max-streams): try again later",
                code="too_many_streams",
                headers={"Retry-After": "1"},
            )
        metrics.open_streams += self.num_choices
        log = self._gateway.request_log
        self._records = [
            log.begin(self._request_id, choice, self.stream_of(choice), choice % self.num_per_prompt)
            for choice in range(self.num_choices)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._gateway.metrics.open_streams -= self.num_choices
        for record in self._records:
            record.close()
        await self._pieces.aclose()
        for stream in self._streams:
            await stream.aclose()

    def stream_of(self, choice: int) -> GenerateStream:
        return self._streams[choice // self.num_per_prompt]

    @property
    def model(self) -> Model:
        """The model that answers; known after `begin`."""
        model = next((stream.model for stream in self._streams if stream.model is not None), None)
        assert model is not None, "begin() comes first"
        return model

    async def begin(self) -> None:
        """Wait for the first piece, so that an error before it can still be the answer's status. Raises KvpoolError."""
        self._first = await anext(self._pieces)

    async def pieces(self) -> AsyncIterator[GenerationPiece]:
        """Yield all pieces, the first one included. Raises KvpoolError."""
        if self._first is not None:
            first, self._first = self._first, None
            yield first
        async for piece in self._pieces:
            yield piece

    async def completions(self) -> list[Completion]:
        """Wait for the end and return all answers by their choices, pieces that were already taken included. Raises KvpoolError."""
        async for _ in self._pieces:
            pass
        return [completion for stream in self._streams for completion in await stream.collect_all()]

    async def _read(self) -> AsyncGenerator[GenerationPiece, None]:
        chunks = _chunks(self._streams[0]) if len(self._streams) == 1 else _merged(self._streams)
        try:
            async with aclosing(chunks):
                async for index, chunk in chunks:
                    yield self._noted(GenerationPiece(index * self.num_per_prompt + chunk.index, chunk))
        except KvpoolError as error:
            for record in self._records:
                record.on_error(error)
            raise

    def _noted(self, piece: GenerationPiece) -> GenerationPiece:
        self._records[piece.choice].on_chunk(piece.chunk)
        if not self._has_token and piece.chunk.token_ids:
            self._has_token = True
            self._gateway.metrics.first_token_seconds.observe(time.monotonic() - self._began)
        return piece


async def _chunks(stream: GenerateStream) -> AsyncGenerator[tuple[int, Chunk], None]:
    async for chunk in stream:
        yield 0, chunk


async def _merged(streams: Sequence[GenerateStream]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yield the chunks of all streams, each with the index of its stream."""
    merged = MergedStreams(streams)
    try:
        while (chunk := await merged.next_chunk()) is not None:
            yield chunk
    finally:
        await merged.aclose()
