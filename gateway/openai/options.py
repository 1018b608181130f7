"""Converts the fields of a body to the options of kvpool's client."""

from __future__ import annotations

from typing import Any, Final

from kvpool.client import GenerateOptions
from kvpool.client.options import SamplingOptions

from ..errors import invalid
from ..settings import GatewaySettings
from .bodies import ChatBody, CompletionBody, GenerationBody

DEFAULT_TEMPERATURE: Final = 1.0
DEFAULT_COMPLETION_TOKENS: Final = 16
_SEEDS: Final = 2**64
"""Number of seeds; negative ones count back from it."""


def common_options(body: GenerationBody, settings: GatewaySettings) -> GenerateOptions:
    """Return the options that chats and completions have in common. Raises ApiError."""
    if body.stream and body.prompt_logprobs is not None:
        raise invalid(
            "prompt_logprobs",
            "prompt_logprobs come with a whole answer: leave out stream, or ask for them in a request of their own",
        )
    options: GenerateOptions = {
        "n": body.n or 1,
        # Where the model's files say none either. Beams are not drawn, and have none.
        "default_temperature": DEFAULT_TEMPERATURE,
        "timeout": settings.timeout,
        "explain": settings.kept_requests > 0,
        "model": body.model,
        "tenant": body.user or "",
        "tenant_salt": body.cache_salt or "",
        "priority": body.priority or 0,
        "ignore_eos": bool(body.ignore_eos),
        "stop_token_ids": body.stop_token_ids or (),
        "max_tokens": body.max_tokens,
        "prompt_logprobs": body.prompt_logprobs,
    }
    num_beams = _num_beams(body)
    if num_beams is not None:
        options["num_beams"] = num_beams
    # Without a search the usual values ask for nothing.
    is_search = num_beams is not None and num_beams > 1
    if body.early_stopping or (is_search and body.early_stopping is not None):
        options["early_stopping"] = body.early_stopping or False
    if body.length_penalty is not None and (is_search or body.length_penalty != 1):
        options["length_penalty"] = body.length_penalty
    if body.stop:
        options["stop"] = body.stop
    if body.min_tokens is not None:
        options["min_tokens"] = body.min_tokens
    for name in SamplingOptions.__annotations__:
        if (value := getattr(body, name)) is not None:
            options[name] = _as_option(name, value)  # type: ignore[literal-required]
    return options


def _as_option(name: str, value: Any) -> Any:
    """Return the value of a sampling option for that of the field with its name."""
    if name == "seed":
        return value % _SEEDS
    if name == "top_k":
        return max(value, 0)  # vLLM writes −1 for all
    return _biases(value) if name == "logit_bias" else value


def chat_options(body: ChatBody, settings: GatewaySettings) -> GenerateOptions:
    """Return the options of a chat. Raises ApiError."""
    options = common_options(body, settings)
    if body.max_completion_tokens is not None:
        options["max_tokens"] = body.max_completion_tokens
    if options.get("max_tokens") == 0:
        raise invalid("max_tokens", "max_tokens: needed 1 or more, or null")
    if body.top_logprobs is not None and not body.logprobs and body.top_logprobs > 0:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    return options


def completion_options(body: CompletionBody, settings: GatewaySettings) -> GenerateOptions:
    """Return the options of a completion. Raises ApiError."""
    options = common_options(body, settings)
    if body.max_tokens is None:
        options["max_tokens"] = DEFAULT_COMPLETION_TOKENS
    elif body.max_tokens == 0:
        if not body.echo:
            raise invalid(
                "max_tokens",
                "max_tokens: 0 generates nothing, which is of use with echo: true only; needed 1 or more, or null",
            )
        options["max_tokens"] = 1  # whose token is dropped
    options["echo"] = bool(body.echo)
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs
        if body.echo:
            num_top = body.prompt_logprobs
            options["prompt_logprobs"] = body.logprobs if num_top is None else max(num_top, body.logprobs)
    return options


def _num_beams(body: GenerationBody) -> int | None:
    """Return the number of beams; 1: no beam search; None: the model's default."""
    if body.num_beams is not None or body.use_beam_search is None:
        return body.num_beams
    return (body.n or 1) if body.use_beam_search else 1


def _biases(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise invalid("logit_bias", f"logit_bias: needed token ids as keys, got {key[:64]!r}")
        biases[int(key)] = value
    return biases
