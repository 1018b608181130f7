"""Serves POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvpool.client import Completion, KvpoolError
from kvpool.client.token_bytes import TokenBytes

from ..context import gateway_of, request_id_of
from .bodies import ChatBody, plain, read_body
from .errors import openai_error
from .fields import check_other_fields
from .generation import GenerationStreams
from .logprobs import chat_logprobs, prompt_logprobs, token_bytes
from .options import chat_options
from .serving import GenerationAnswer, check_count, data, respond
from .usage import StreamUsage


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


class ChatAnswer(GenerationAnswer[ChatBody]):
    """Puts the pieces of a generation into the form of a chat."""

    prompt_field = "messages"
    id_prefix = "chatcmpl"
    kind = "chat.completion"

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events. The first one of a choice has its role, the last one its finish reason."""
        head = self._head("chat.completion.chunk")
        usage = StreamUsage(self.generation, self.body.stream_options)
        begun: set[int] = set()
        async for choice, chunk in self.generation.pieces():
            if choice not in begun:
                begun.add(choice)
                role: dict[str, Any] = {"role": "assistant", "content": ""}
                prompt_ids = {"prompt_token_ids": self._prompt_ids(choice)} if self._wants_ids else {}
                yield data(head | {"choices": [_entry(choice, role)]} | usage.of(choice) | prompt_ids)
            usage.add(choice, chunk)
            logprobs = None
            if chunk.logprobs is not None and chunk.token_ids:
                logprobs = chat_logprobs(self._tokens(), chunk.token_ids, chunk.logprobs)
            if chunk.text or logprobs is not None or (self._wants_ids and chunk.token_ids):
                token_ids = {"token_ids": chunk.token_ids} if self._wants_ids else {}
                entry = _entry(choice, {"content": chunk.text}, logprobs) | token_ids
                yield data(head | {"choices": [entry]} | usage.of(choice))
            if chunk.finish_reason is not None:
                last = _entry(choice, {}, finish_reason=chunk.finish_reason.value)
                yield data(head | {"choices": [last]} | usage.of(choice))
        if usage.is_wanted:
            yield data(head | {"choices": [], "usage": self._usage(await self.generation.completions())})

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return the object of one answer."""
        logprobs = None
        if self.body.logprobs:
            logprobs = chat_logprobs(self._tokens(), completion.token_ids, completion.logprobs or ())
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        finish_reason = completion.finish_reason.value
        choice = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
        return choice | ({"token_ids": completion.token_ids} if self._wants_ids else {})

    async def whole(self) -> dict[str, Any]:
        """Return the answer with all choices, and what was asked of the prompt."""
        whole = await super().whole()
        prompt_ids = self._prompt_ids(0)
        if self._wants_ids:
            whole["prompt_token_ids"] = prompt_ids
        if self.body.prompt_logprobs is not None:
            (first, *_) = await self.generation.completions()
            whole["prompt_logprobs"] = prompt_logprobs(self._tokens(), prompt_ids, first.prompt_logprobs or ())
        return whole

    def _tokens(self) -> TokenBytes:
        tokens = token_bytes(self.generation.model)
        assert tokens is not None, "a chat was tokenised"
        return tokens


def _entry(index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
