"""Serves POST /v1/completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from kvpool.client import Chunk, Completion, KvpoolError, TokenLogprobs
from kvpool.client.token_bytes import TokenBytes

from ..context import gateway_of, request_id_of
from ..errors import invalid
from .bodies import CompletionBody, read_body
from .errors import openai_error
from .fields import check_other_fields
from .generation import GenerationStreams
from .logprobs import CompletionLogprobs, prompt_logprobs, token_bytes
from .options import completion_options
from .serving import GenerationAnswer, check_count, data, respond
from .usage import StreamUsage


async def complete(request: Request) -> Response:
    """Answer with the continuations of the prompts, whole or as a stream."""
    gateway = gateway_of(request)
    body = await read_body(request, CompletionBody)
    headers = check_other_fields(body, ignore=gateway.settings.ignore_unknown_fields)
    prompts = _prompts(body)
    check_count(gateway, body.n or 1, len(prompts))
    options = completion_options(body, gateway.settings)
    try:
        streams = [gateway.client.generate(prompt, **options) for prompt in prompts]
    except KvpoolError as error:
        raise openai_error(error, CompletionAnswer.prompt_field) from error
    generation = GenerationStreams(gateway, streams, request_id=request_id_of(request))
    return await respond(request, CompletionAnswer(body, generation), headers)


def _prompts(body: CompletionBody) -> Sequence[str | list[int]]:
    """Return the prompts, at least one. Raises ApiError."""
    prompt = body.prompt
    is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
    prompts = cast(Sequence[str | list[int]], [prompt] if is_one else prompt)
    if any(len(prompt) == 0 for prompt in prompts):
        raise invalid("prompt", "prompt: needed at least one character or token in each prompt")
    return prompts


class CompletionAnswer(GenerationAnswer[CompletionBody]):
    """Puts the pieces of a generation into the form of a completion."""

    prompt_field = "prompt"
    id_prefix = "cmpl"

    kind = "text_completion"

    def __init__(self, body: CompletionBody, generation: GenerationStreams) -> None:
        super().__init__(body, generation)
        self._drops_generated = body.max_tokens == 0
        self._encoders: dict[int, CompletionLogprobs] = {}
        self._num_prompt_tokens_shown: Counter[int] = Counter()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events. The last one of a choice has its finish reason."""
        head = self._head(self.kind)
        usage = StreamUsage(self.generation, self.body.stream_options, drop_generated=self._drops_generated)
        begun: set[int] = set()
        async for choice, chunk in self.generation.pieces():
            usage.add(choice, chunk)
            event = self._fields(choice, chunk)
            if not any(event.values()) and not (self._wants_ids and self._token_ids(chunk)):
                continue
            if self._wants_ids:
                event["token_ids"] = self._token_ids(chunk)
                if choice not in begun:
                    event["prompt_token_ids"] = self._prompt_ids(choice)
            begun.add(choice)
            yield data(head | {"choices": [{"index": choice, **event}]} | usage.of(choice))
        if usage.is_wanted:
            yield data(head | {"choices": [], "usage": self._usage(await self.generation.completions())})

    async def whole(self) -> dict[str, Any]:
        """Return the answer with all choices."""
        if self.body.logprobs is not None:
            self._tokens()  # refuses before anything is computed
        return await super().whole()

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return the object of one answer."""
        prompt_ids = self._prompt_ids(index)
        choice = {"index": index, **self._fields(index, completion)}
        if self._wants_ids:
            choice |= {"prompt_token_ids": prompt_ids, "token_ids": self._token_ids(completion)}
        if self.body.prompt_logprobs is not None and (tokens := token_bytes(self.generation.model)) is not None:
            choice["prompt_logprobs"] = prompt_logprobs(tokens, prompt_ids, completion.prompt_logprobs or ())
        return choice

    def _fields(self, choice: int, piece: Chunk | Completion) -> dict[str, Any]:
        """Return text, log-probabilities and finish reason of a piece, or of a whole answer."""
        finish_reason = piece.finish_reason and ("length" if self._drops_generated else piece.finish_reason.value)
        return {
            "text": self._text(choice, piece.text),
            "logprobs": self._logprobs(choice, piece),
            "finish_reason": finish_reason,
        }

    def _text(self, choice: int, text: str) -> str:
        """Return the text to show. With max_tokens 0 that is only the echo: it comes with the first token, whose text may be joined
        to it, so the prompt is decoded."""
        if not self._drops_generated:
            return text
        tokenizer = self.generation.model.tokenizer
        if not text or tokenizer is None:
            return ""
        echo: str = tokenizer.decode(list(self._prompt_ids(choice)))
        return echo

    def _token_ids(self, piece: Chunk | Completion) -> tuple[int, ...]:
        return () if self._drops_generated else piece.token_ids

    def _logprobs(self, choice: int, piece: Chunk | Completion) -> dict[str, list[Any]] | None:
        """Encode the log-probabilities of the piece's tokens; with `echo` those of the prompt come first. None: there are none."""
        if self.body.logprobs is None:
            return None
        tokens = self._tokens()
        ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        if self.body.echo and piece.prompt_logprobs:
            begin = self._num_prompt_tokens_shown[choice]
            self._num_prompt_tokens_shown[choice] += len(piece.prompt_logprobs)
            ids += self._prompt_ids(choice)[begin : self._num_prompt_tokens_shown[choice]]
            logprobs += piece.prompt_logprobs
        if not self._drops_generated:
            ids += piece.token_ids
            logprobs += piece.logprobs or ()
        if not ids:
            return None
        if choice not in self._encoders:
            before = () if self.body.echo else self._prompt_ids(choice)
            self._encoders[choice] = CompletionLogprobs(tokens, self.body.logprobs, before=before)
        return self._encoders[choice].encode(ids, logprobs)

    def _tokens(self) -> TokenBytes:
        tokens = token_bytes(self.generation.model)
        if tokens is None:
            raise invalid("logprobs", "logprobs: the model has no tokenizer, so its tokens have no text")
        return tokens
