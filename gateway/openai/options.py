"""From the fields of a body to the options of kvpool's client."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from kvpool.client import GenerateOptions

from ..errors import ApiError
from ..settings import GatewaySettings
from .bodies import ChatBody, CompletionBody, GenerationBody

DEFAULT_TEMPERATURE: Final = 1.0
DEFAULT_COMPLETION_TOKENS: Final = 16
_SEEDS: Final = 2**64
"""Negative seeds count back from there."""


def common_options(body: GenerationBody, settings: GatewaySettings) -> GenerateOptions:
    """Those of all answers of a request. Raises ApiError."""
    num_beams = _num_beams(body)
    # Beams are not drawn, so without a word about it there is no temperature.
    usual_temperature = DEFAULT_TEMPERATURE if num_beams == 1 else 0.0
    options: GenerateOptions = {
        "n": body.n or 1,
        "num_beams": num_beams,
        "temperature": usual_temperature if body.temperature is None else body.temperature,
        "timeout": settings.timeout,
        "explain": settings.kept_requests > 0,
        "model": body.model,
        "tenant": body.user or "",
        "tenant_salt": body.cache_salt or "",
        "priority": body.priority or 0,
        "ignore_eos": bool(body.ignore_eos),
        "min_tokens": body.min_tokens or 0,
        "stop_token_ids": body.stop_token_ids or (),
        "max_tokens": body.max_tokens,
        "seed": None if body.seed is None else body.seed % _SEEDS,
        "prompt_logprobs": body.prompt_logprobs,
    }
    if body.early_stopping:
        options["early_stopping"] = body.early_stopping
    if body.length_penalty not in (None, 1):
        options["length_penalty"] = body.length_penalty
    if body.stop:
        options["stop"] = body.stop
    if body.logit_bias:
        options["logit_bias"] = _biases(body.logit_bias)
    if body.top_k is not None:
        options["top_k"] = max(body.top_k, 0)  # vLLM writes −1 for all
    if body.top_p is not None:
        options["top_p"] = body.top_p
    if body.min_p is not None:
        options["min_p"] = body.min_p
    if body.repetition_penalty is not None:
        options["repetition_penalty"] = body.repetition_penalty
    if body.presence_penalty is not None:
        options["presence_penalty"] = body.presence_penalty
    if body.frequency_penalty is not None:
        options["frequency_penalty"] = body.frequency_penalty
    return options


def chat_options(body: ChatBody, settings: GatewaySettings) -> GenerateOptions:
    """Of a chat."""
    options = common_options(body, settings)
    if body.max_completion_tokens is not None:
        options["max_tokens"] = body.max_completion_tokens
    if options.get("max_tokens") == 0:
        raise ApiError(
            HTTPStatus.BAD_REQUEST, "max_tokens: needed 1 or more, or null", param="max_tokens", code="invalid_value"
        )
    if body.top_logprobs is not None and not body.logprobs and body.top_logprobs > 0:
        raise ApiError(
            HTTPStatus.BAD_REQUEST, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value"
        )
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    return options


def completion_options(body: CompletionBody, settings: GatewaySettings) -> GenerateOptions:
    """Of a completion."""
    options = common_options(body, settings)
    if body.max_tokens is None:
        options["max_tokens"] = DEFAULT_COMPLETION_TOKENS
    elif body.max_tokens == 0:
        if not body.echo:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                "max_tokens: 0 generates nothing, which is of use with echo: true only; needed 1 or more, or null",
                param="max_tokens",
                code="invalid_value",
            )
        options["max_tokens"] = 1  # whose token is dropped
    options["echo"] = bool(body.echo)
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs
        if body.echo:
            wanted = body.prompt_logprobs
            options["prompt_logprobs"] = body.logprobs if wanted is None else max(wanted, body.logprobs)
    return options


def _num_beams(body: GenerationBody) -> int:
    """1: no beam search."""
    if body.num_beams is not None or not body.use_beam_search:
        return body.num_beams or 1
    return body.n or 1


def _biases(given: dict[str, float]) -> dict[int, float]:
    found = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"logit_bias: needed token ids as keys, got {key[:64]!r}",
                param="logit_bias",
                code="invalid_value",
            )
        found[int(key)] = value
    return found
