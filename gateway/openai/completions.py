"""Serves POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from kvpool.client import Chunk, KvpoolError, TokenLogprobs

from ..context import gateway_of, request_id_of
from ..errors import invalid
from .bodies import CompletionBody, read_body
from .errors import openai_error
from .event_stream import data
from .fields import check_other_fields
from .generation import GenerationStreams
from .logprobs import CompletionLogprobs, prompt_logprobs
from .options import completion_options
from .serving import GenerationAnswer, check_count, respond
from .token_bytes import token_bytes
from .usage import StreamUsage, encode_usage


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


class CompletionAnswer(GenerationAnswer):
    """Puts the pieces of a generation into the form of a completion."""

    prompt_field = "prompt"
    id_prefix = "cmpl"

    def __init__(self, body: CompletionBody, generation: GenerationStreams) -> None:
        super().__init__(body, generation)
        self._body = body
        self._drops_generated = body.max_tokens == 0
        self._encoders: dict[int, CompletionLogprobs] = {}
        self._num_prompt_tokens_shown: dict[int, int] = {}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events. The last one of a choice has its finish reason."""
        head = self._head("text_completion")
        usage = StreamUsage(self.generation, self._body.stream_options, drop_generated=self._drops_generated)
        begun: set[int] = set()
        async for choice, chunk in self.generation.pieces():
            usage.add(choice, chunk)
            text, token_ids = self._text(choice, chunk), self._token_ids(chunk)
            logprobs = self._logprobs(choice, chunk)
            finish_reason = self._finish_reason(chunk)
            if not text and logprobs is None and finish_reason is None and not (self._wants_ids and token_ids):
                continue
            event = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
            if self._wants_ids:
                event["token_ids"] = token_ids
                if choice not in begun:
                    event["prompt_token_ids"] = self._prompt_ids(choice)
            begun.add(choice)
            yield data(head | {"choices": [event]} | usage.of(choice))
        if usage.is_wanted:
            yield data(head | {"choices": [], "usage": self._usage()})

    async def whole(self) -> dict[str, Any]:
        """Return the answer with all choices."""
        num_choices = self.generation.num_choices
        texts: list[list[str]] = [[] for _ in range(num_choices)]
        ids: list[list[int]] = [[] for _ in range(num_choices)]
        logprobs: list[dict[str, list[Any]]] = [{} for _ in range(num_choices)]
        of_prompts: list[list[TokenLogprobs | None]] = [[] for _ in range(num_choices)]
        reasons: list[str | None] = [None] * num_choices
        async for choice, chunk in self.generation.pieces():
            texts[choice].append(self._text(choice, chunk))
            ids[choice] += self._token_ids(chunk)
            of_prompts[choice] += chunk.prompt_logprobs or ()
            for name, values in (self._logprobs(choice, chunk) or {}).items():
                logprobs[choice].setdefault(name, []).extend(values)
            reasons[choice] = self._finish_reason(chunk) or reasons[choice]
        choices = []
        for choice in range(num_choices):
            prompt_ids = self._prompt_ids(choice)
            entry: dict[str, Any] = {
                "index": choice,
                "text": "".join(texts[choice]),
                "logprobs": logprobs[choice] or None,
                "finish_reason": reasons[choice],
            }
            if self._wants_ids:
                entry |= {"prompt_token_ids": prompt_ids, "token_ids": ids[choice]}
            if self._body.prompt_logprobs is not None and (tokens := token_bytes(self.generation.model)) is not None:
                entry["prompt_logprobs"] = prompt_logprobs(tokens, prompt_ids, of_prompts[choice])
            choices.append(entry)
        return self._head("text_completion") | {"choices": choices, "usage": self._usage()}

    def _text(self, choice: int, chunk: Chunk) -> str:
        """Return the text of a chunk. With max_tokens 0 that is only the echo: it comes with the first token, whose text may be
        joined to it, so the prompt is decoded."""
        if not self._drops_generated:
            return chunk.text
        tokenizer = self.generation.model.tokenizer
        if not chunk.text or tokenizer is None:
            return ""
        text: str = tokenizer.decode(list(self._prompt_ids(choice)))
        return text

    def _token_ids(self, chunk: Chunk) -> tuple[int, ...]:
        return () if self._drops_generated else chunk.token_ids

    def _finish_reason(self, chunk: Chunk) -> str | None:
        if chunk.finish_reason is None:
            return None
        return "length" if self._drops_generated else chunk.finish_reason.value

    def _logprobs(self, choice: int, chunk: Chunk) -> dict[str, list[Any]] | None:
        """Encode the log-probabilities of the chunk's tokens; with `echo` those of the prompt come first. None: there are none."""
        if self._body.logprobs is None:
            return None
        tokens = token_bytes(self.generation.model)
        if tokens is None:
            raise invalid("logprobs", "logprobs: the model has no tokenizer, so its tokens have no text")
        ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        if self._body.echo and chunk.prompt_logprobs:
            begin = self._num_prompt_tokens_shown.get(choice, 0)
            end = begin + len(chunk.prompt_logprobs)
            self._num_prompt_tokens_shown[choice] = end
            ids += self._prompt_ids(choice)[begin:end]
            logprobs += chunk.prompt_logprobs
        if not self._drops_generated:
            ids += chunk.token_ids
            logprobs += chunk.logprobs or ()
        if not ids:
            return None
        if choice not in self._encoders:
            before = () if self._body.echo else self._prompt_ids(choice)
            self._encoders[choice] = CompletionLogprobs(tokens, self._body.logprobs, before=before)
        return self._encoders[choice].encode(ids, logprobs)

    def _usage(self) -> dict[str, Any]:
        return encode_usage(self.generation.usages, self._body.n or 1, drop_generated=self._drops_generated)
