"""Workers that tell the same story, and break off where a test wants it: a real worker's edge and text behind a fake engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from google.rpc import status_pb2
from tokenizers import Tokenizer, decoders, models

from kvpool.v1 import common_pb2, worker_pb2
from kvpool.worker_service.cache.sequence import CacheSequence
from kvpool.worker_service.codec import decode_generate, encode_chunk
from kvpool.worker_service.engine.prompt import PromptEncoder
from kvpool.worker_service.engine.request import Request
from kvpool.worker_service.step import RowLogprobs, SampledToken
from tests.client.fakes import UNAVAILABLE, Answering, FakeModel, FakeWorker

EOS = 256
VOCAB_SIZE = 257

Story = Callable[[int, int], int]
"""(seed, absolute position) → the token there: all that a token may depend on."""


def byte_tokenizer() -> Tokenizer:
    """One token per byte, as a model writes characters that its vocabulary lacks, and an end-of-text id."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token=None))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def story_model(max_model_len: int = 1000) -> FakeModel:
    """The model of all storytellers."""
    files: dict[int, bytes] = {worker_pb2.MODEL_FILE_TOKENIZER: byte_tokenizer().to_str().encode()}
    return FakeModel(files=files, max_model_len=max_model_len, vocab_size=VOCAB_SIZE)


def written(prompt: Sequence[int], *tokens: int) -> Story:
    """These tokens behind the prompt, then the end."""
    return lambda seed, position: (*tokens, *[EOS] * 50)[position - len(prompt)]


@dataclass(frozen=True)
class Telling:
    """How one attempt is answered."""

    breaks_behind: int | None = None
    """Tokens of this attempt behind which the ending comes; None: the story is told to its end."""
    ending: status_pb2.Status = field(default_factory=lambda: UNAVAILABLE)
    waits_for: asyncio.Event | None = None
    """Says nothing before the ending until it is set."""
    sizes: Sequence[int] = (1,)
    """Tokens per message, over and over."""
    num_cached: int = 0
    keeps_end: bool = False
    """Sends everything but the finish reason, then the ending: as engines may that send it in a message of its own."""


class Storyteller(FakeWorker):
    """Answers each request by the next of its tellings; behind them tells everything."""

    def __init__(self, worker_id: str, story: Story, *tellings: Telling, model: FakeModel | None = None) -> None:
        super().__init__(worker_id, model=model or story_model())
        self._story = story
        self.tellings = deque(tellings)
        self._tokenizer = byte_tokenizer()
        self._prompts = PromptEncoder(self._tokenizer, self.model.max_model_len)

    async def _answer(self, request: worker_pb2.GenerateRequest) -> Answering:
        telling = self.tellings.popleft() if self.tellings else Telling()
        async for message in self._told(request, telling):
            yield message
        if telling.breaks_behind is None and not telling.keeps_end:
            return
        if telling.waits_for is not None:
            await telling.waits_for.wait()
        yield telling.ending

    async def _told(
        self, asked: worker_pb2.GenerateRequest, telling: Telling
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        params = decode_generate(asked, self._prompts)
        num_prompt = len(params.token_ids)
        room = self.model.max_model_len - num_prompt
        max_tokens = params.max_tokens or room
        assert max_tokens <= room, "the client asks for more than fits"
        sequence = CacheSequence(
            params.sequence_id, params.attempt, common_pb2.Root(), params.token_ids, max_new_tokens=max_tokens
        )
        sequence.num_cached_tokens = telling.num_cached
        stops = params.stop_token_ids | (frozenset() if params.ignore_eos else {EOS})
        told = Request(params, sequence, max_tokens, stops, params.text_decoder(self._tokenizer))
        told.on_granted()
        yield await _message_of(told)
        number, is_ended = 0, False
        while not is_ended and number != telling.breaks_behind:
            size = telling.sizes[number % len(telling.sizes)]
            for _ in range(size):
                token = self._story(params.sampling.seed, num_prompt + number)
                wanted = params.sampling.num_logprobs is not None
                logprobs = RowLogprobs(-float(num_prompt + number), []) if wanted else None
                sampled = SampledToken(token, logprobs)
                told.take(sampled)
                is_ended = told.deliver(sampled)
                number += 1
                if is_ended or number == telling.breaks_behind:
                    break
            message = await _message_of(told)
            if is_ended and telling.keeps_end:
                message.ClearField("usage")
                message.ClearField("finish_reason")
            yield message


async def _message_of(told: Request) -> worker_pb2.GenerateResponse:
    chunk = await told.stream.get()
    assert chunk is not None
    (message,) = encode_chunk(chunk)
    return message
