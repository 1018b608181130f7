"""Serves POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, Final
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvpool.client import KvpoolError, Model, TokenLogprobs
from kvpool.client.token_bytes import TokenBytes

from ..context import gateway_of, request_id_of
from .bodies import ChatBody, plain, read_body
from .errors import openai_error
from .event_stream import GenerationEvents, data
from .fields import check_other_fields
from .generation import GenerationStreams
from .logprobs import ChatLogprobs, prompt_logprobs
from .options import chat_options
from .serving import check_count, respond
from .token_bytes import TokenBytesOfModels
from .usage import StreamUsage, encode_usage

PROMPT_FIELD: Final = "messages"


def chat_route(tokens_of_models: TokenBytesOfModels) -> Route:
    """Return the route; all routes share `tokens_of_models`."""

    async def chat(request: Request) -> Response | GenerationEvents:
        gateway = gateway_of(request)
        body = await read_body(request, ChatBody)
        headers = check_other_fields(body, ignore=gateway.settings.ignore_unknown_fields)
        check_count(gateway, body.n or 1)
        options = chat_options(body, gateway.settings)
        try:
            stream = gateway.client.chat(plain(body.messages), template_arguments=body.chat_template_kwargs, **options)
        except KvpoolError as error:
            raise openai_error(error, PROMPT_FIELD) from error
        generation = GenerationStreams(gateway, [stream], request_id=request_id_of(request))
        answer = ChatAnswer(body, generation, tokens_of_models)
        return await respond(
            request, generation, answer, stream=bool(body.stream), prompt_field=PROMPT_FIELD, headers=headers
        )

    return Route("/v1/chat/completions", chat, methods=["POST"])


class ChatAnswer:
    """Puts the pieces of a generation into the form of a chat."""

    def __init__(self, body: ChatBody, generation: GenerationStreams, tokens_of_models: TokenBytesOfModels) -> None:
        self._body = body
        self._generation = generation
        self._tokens_of_models = tokens_of_models
        self._id = f"chatcmpl-{uuid4().hex}"
        self._created = int(time.time())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events. The first one of a choice has its role, the last one its finish reason."""
        head = self._head("chat.completion.chunk")
        usage = StreamUsage(self._generation, self._body.stream_options)
        wants_ids = bool(self._body.return_token_ids)
        begun: set[int] = set()
        encoder: ChatLogprobs | None = None
        async for choice, chunk in self._generation.pieces():
            if choice not in begun:
                begun.add(choice)
                role: dict[str, Any] = {"role": "assistant", "content": ""}
                first = head | {"choices": [_choice_of_chunk(choice, role, None, None)]} | usage.of(choice)
                if wants_ids:
                    first["prompt_token_ids"] = self._generation.stream_of(choice).prompt_token_ids
                yield data(first)
            usage.add(choice, chunk)
            logprobs = None
            if chunk.logprobs is not None and chunk.token_ids:
                encoder = encoder or ChatLogprobs(self._tokens())
                logprobs = encoder.encode(chunk.token_ids, chunk.logprobs)
            if chunk.text or logprobs is not None or (wants_ids and chunk.token_ids):
                event = _choice_of_chunk(choice, {"content": chunk.text}, logprobs, None)
                if wants_ids:
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
        async for choice, chunk in self._generation.pieces():
            texts.setdefault(choice, []).append(chunk.text)
            ids.setdefault(choice, []).extend(chunk.token_ids)
            logprobs.setdefault(choice, []).extend(chunk.logprobs or ())
            if choice == 0:
                of_prompt += chunk.prompt_logprobs or ()
            if chunk.finish_reason is not None:
                reasons[choice] = chunk.finish_reason.value
        choices = []
        for choice in range(self._generation.num_choices):
            encoded = None
            if self._body.logprobs:
                encoded = ChatLogprobs(self._tokens()).encode(ids[choice], logprobs[choice])
            message = {"role": "assistant", "content": "".join(texts[choice]), "refusal": None}
            entry = {"index": choice, "message": message, "logprobs": encoded, "finish_reason": reasons[choice]}
            if self._body.return_token_ids:
                entry["token_ids"] = ids[choice]
            choices.append(entry)
        whole = self._head("chat.completion") | {"choices": choices, "usage": self._usage()}
        prompt_ids = self._generation.stream_of(0).prompt_token_ids
        if self._body.return_token_ids:
            whole["prompt_token_ids"] = prompt_ids
        if self._body.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(self._tokens(), prompt_ids, of_prompt)
        return whole

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._body.model or self._model().name,
            "system_fingerprint": self._model().fingerprint,
        }

    def _usage(self) -> dict[str, Any]:
        return encode_usage(self._generation.usages, self._generation.num_choices)

    def _model(self) -> Model:
        return self._generation.model

    def _tokens(self) -> TokenBytes:
        tokens = self._tokens_of_models.of(self._model())
        assert tokens is not None, "a chat was tokenised"
        return tokens


def _choice_of_chunk(index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
