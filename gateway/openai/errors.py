"""Converts errors of kvpool's client to OpenAI's codes and field names."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from kvpool.client import GenerateOptions, InvalidRequest, KvpoolError, NotFound

from ..errors import ApiError, api_error

_FIELDS: Final[Mapping[str, str]] = {"tenant": "user", "tenant_salt": "cache_salt", "stop_strings": "stop"}
"""Field in a body of each client option that has another name there."""


def openai_error(error: KvpoolError, prompt_field: str) -> ApiError:
    """Convert an error. `prompt_field` is the field that has the prompt."""
    if error.reason == "NEVER_FITS":
        field = _field(error, prompt_field)
        return ApiError(HTTPStatus.BAD_REQUEST, error.message, param=field, code="context_length_exceeded")
    if isinstance(error, NotFound) and error.reason == "UNKNOWN_MODEL":
        return ApiError(HTTPStatus.NOT_FOUND, error.message, param="model", code="model_not_found")
    if error.reason == "AMBIGUOUS_MODEL":
        return api_error(error, param="model")
    if isinstance(error, InvalidRequest):
        field = _field(error, prompt_field)
        if field == "max_tokens" and error.violations:
            # A worker refuses it only together with the prompt.
            return api_error(error, param=field, code="context_length_exceeded")
        return api_error(error, param=field, code="invalid_value")
    return api_error(error)


def _field(error: KvpoolError, prompt_field: str) -> str:
    """Return the field that the error is about: its violations name it, or its message begins with it."""
    named = error.violations[0] if error.violations else error.message
    word = named.partition(" ")[0].rstrip(":").rpartition(".")[2]
    if word.isidentifier() and word.islower() and ("_" in word or word in GenerateOptions.__annotations__):
        return _FIELDS.get(word, word)
    return prompt_field
