"""Serves POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvpool.client import KvpoolError, TokenLogprobs
from kvpool.client.token_bytes import TokenBytes

from ..context import gateway_of, request_id_of
from .bodies import ChatBody, plain, read_body
from .errors import openai_error
from .event_stream import data
from .fields import check_other_fields
from .generation import GenerationStreams
from .logprobs import ChatLogprobs, prompt_logprobs
from .options import chat_options
from .serving import GenerationAnswer, check_count, respond
from .token_bytes import token_bytes
from .usage import StreamUsage, encode_usage


async def chat(request: Request) -> Response:
    """Answer with what the assistant says next, whole or as a stream."""
    gateway = gateway_of(request)
    body = await read_body(request, ChatBody)
    headers = check_other_fields(body, ignore=gateway.settings.ignore_unknown_fields)
    check_count(gateway, body.n or 1)
    options = chat_options(body, gateway.settings)
    try:
        stream = gateway.client.chat(plain(body.messages), template_arguments=body.chat_template_kwargs, **options)
    except KvpoolError as error:
        raise openai_error(error, ChatAnswer.prompt_field) from error
    generation = GenerationStreams(gateway, [stream], request_id=request_id_of(request))
    return await respond(request, ChatAnswer(body, generation), headers)


class ChatAnswer(GenerationAnswer):
    """Puts the pieces of a generation into the form of a chat."""

    prompt_field = "messages"
    id_prefix = "chatcmpl"

    def __init__(self, body: ChatBody, generation: GenerationStreams) -> None:
        super().__init__(body, generation)
        self._body = body

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events. The first one of a choice has its role, the last one its finish reason."""
        head = self._head("chat.completion.chunk")
        usage = StreamUsage(self.generation, self._body.stream_options)
        begun: set[int] = set()
        encoder: ChatLogprobs | None = None
        async for choice, chunk in self.generation.pieces():
            if choice not in begun:
                begun.add(choice)
                role: dict[str, Any] = {"role": "assistant", "content": ""}
                first = head | {"choices": [_choice_of_chunk(choice, role, None, None)]} | usage.of(choice)
                if self._wants_ids:
                    first["prompt_token_ids"] = self._prompt_ids(choice)
                yield data(first)
            usage.add(choice, chunk)
            logprobs = None
            if chunk.logprobs is not None and chunk.token_ids:
                encoder = encoder or ChatLogprobs(self._tokens())
                logprobs = encoder.encode(chunk.token_ids, chunk.logprobs)
            if chunk.text or logprobs is not None or (self._wants_ids and chunk.token_ids):
                event = _choice_of_chunk(choice, {"content": chunk.text}, logprobs, None)
                if self._wants_ids:
                    event["token_ids"] = chunk.token_ids
                yield data(head | {"choices": [event]} | usage.of(choice))
            if chunk.finish_reason is not None:
                last = _choice_of_chunk(choice, {}, None, chunk.finish_reason.value)
                yield data(head | {"choices": [last]} | usage.of(choice))
        if usage.is_wanted:
            yield data(head | {"choices": [], "usage": self._usage()})

    async def whole(self) -> dict[str, Any]:
        """Return the answer with all choices."""
        texts: dict[int, list[str]] = {}
        ids: dict[int, list[int]] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        of_prompt: list[TokenLogprobs | None] = []
        reasons: dict[int, str] = {}
        async for choice, chunk in self.generation.pieces():
            texts.setdefault(choice, []).append(chunk.text)
            ids.setdefault(choice, []).extend(chunk.token_ids)
            logprobs.setdefault(choice, []).extend(chunk.logprobs or ())
            if choice == 0:
                of_prompt += chunk.prompt_logprobs or ()
            if chunk.finish_reason is not None:
                reasons[choice] = chunk.finish_reason.value
        choices = []
        for choice in range(self.generation.num_choices):
            encoded = None
            if self._body.logprobs:
                encoded = ChatLogprobs(self._tokens()).encode(ids[choice], logprobs[choice])
            message = {"role": "assistant", "content": "".join(texts[choice]), "refusal": None}
            entry = {"index": choice, "message": message, "logprobs": encoded, "finish_reason": reasons[choice]}
            if self._wants_ids:
                entry["token_ids"] = ids[choice]
            choices.append(entry)
        whole = self._head("chat.completion") | {"choices": choices, "usage": self._usage()}
        prompt_ids = self._prompt_ids(0)
        if self._wants_ids:
            whole["prompt_token_ids"] = prompt_ids
        if self._body.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(self._tokens(), prompt_ids, of_prompt)
        return whole

    def _usage(self) -> dict[str, Any]:
        return encode_usage(self.generation.usages, self.generation.num_choices)

    def _tokens(self) -> TokenBytes:
        tokens = token_bytes(self.generation.model)
        assert tokens is not None, "a chat was tokenised"
        return tokens


def _choice_of_chunk(index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
