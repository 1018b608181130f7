"""Serves POST /tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvpool.client import InvalidRequest, KvpoolError
from kvpool.client.encoding import num_characters
from kvpool.client.messages import as_messages

from ..context import gateway_of
from ..errors import invalid
from .bodies import DetokenizeBody, TokenizeBody, plain, read_body
from .errors import openai_error
from .fields import check_other_fields
from .logprobs import shown, token_bytes


async def tokenize(request: Request) -> Response:
    """Answer with the ids of a text or of a chat."""
    gateway = gateway_of(request)
    body = await read_body(request, TokenizeBody)
    headers = check_other_fields(body, ignore=gateway.settings.ignore_unknown_fields)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "needed either prompt or messages")
    field = "prompt" if body.messages is None else "messages"
    try:
        model = await gateway.client.model(body.model)
        if body.messages is not None:
            messages = as_messages(plain(body.messages))
            ids = await gateway.encoding.run(
                num_characters(messages),
                lambda: model.encode_chat(messages, body.chat_template_kwargs, check=False),
            )
        else:
            text, special = body.prompt or "", body.add_special_tokens is not False
            ids = await gateway.encoding.run(len(text), lambda: model.encode_text(text, special=special))
    except KvpoolError as error:
        raise openai_error(error, field) from error
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
    if body.return_token_strs:
        tokens = token_bytes(model)
        assert tokens is not None, "a text was tokenised"
        answer["token_strs"] = [shown(tokens.of(token_id)) for token_id in ids]
    return JSONResponse(answer, headers=headers)


async def detokenize(request: Request) -> Response:
    """Answer with the text of token ids."""
    gateway = gateway_of(request)
    body = await read_body(request, DetokenizeBody)
    headers = check_other_fields(body, ignore=gateway.settings.ignore_unknown_fields)
    try:
        model = await gateway.client.model(body.model)
        if model.tokenizer is None:
            raise InvalidRequest(f"{model.name} has no tokenizer", reason="NO_TOKENIZER")
    except KvpoolError as error:
        raise openai_error(error, "tokens") from error
    wrong = next((token_id for token_id in body.tokens if not 0 <= token_id < model.vocab_size), None)
    if wrong is not None:
        raise invalid(
            "tokens", f"tokens: {wrong} is outside 0 … {model.vocab_size - 1}, the vocabulary of {model.name}"
        )
    text = await asyncio.to_thread(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": text}, headers=headers)
