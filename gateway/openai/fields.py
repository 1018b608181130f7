"""Checks the fields that kvpool does not have: values that change nothing may pass, all others are refused.

A field that is ignored in silence makes an answer wrong in silence: a request for JSON would get prose. So a field passes only if
it is null or has the value that means "as usual". All others are refused by name or, with --ignore-unknown-fields, listed in a
header."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final

from pydantic import BaseModel

from ..errors import ApiError
from .bodies import Body

IGNORED_HEADER: Final = "X-Kvpool-Ignored"
MAX_IGNORED_BYTES: Final = 1024
"""Longest value of the header: a body may have any number of fields."""


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(usual) and value == usual for usual in values)


_AS_USUAL: Final[Mapping[str, Callable[[Any], bool]]] = {
    "add_generation_prompt": _one_of(True),
    "add_special_tokens": _one_of(True),
    "allowed_token_ids": _one_of([]),
    "bad_words": _one_of([]),
    "best_of": _one_of(1),
    "continue_final_message": _one_of(False),
    "detokenize": _one_of(True),
    "documents": _one_of([]),
    "echo": _one_of(False),
    "function_call": _one_of("none", "auto"),
    "functions": _one_of([]),
    "include_reasoning": _one_of(True),
    "include_stop_str_in_output": _one_of(False),
    "logits_processors": _one_of([]),
    "metadata": _one_of({}),
    "modalities": _one_of(["text"]),
    "no_stop_trim": _one_of(False),
    "parallel_tool_calls": _one_of(True, False),
    "response_format": _one_of({"type": "text"}),
    "return_hidden_states": _one_of(False),
    "return_tokens_as_token_ids": _one_of(False),
    "separate_reasoning": _one_of(True),
    "service_tier": _one_of("auto", "default"),
    "skip_special_tokens": _one_of(True),
    "spaces_between_special_tokens": _one_of(True),
    "store": _one_of(False),
    "stream_reasoning": _one_of(True),
    "suffix": _one_of(""),
    "tool_choice": _one_of("none", "auto"),
    "tools": _one_of([]),
    "verbosity": _one_of("medium"),
}

_WHY: Final[Mapping[str, str]] = {
    "allowed_token_ids": "kvpool cannot restrict the vocabulary; logit_bias can favour tokens",
    "audio": "the models behind this gateway write text only",
    "bad_words": "kvpool cannot ban words; logit_bias can ban token ids",
    "best_of": "kvpool returns every answer that it generates; ask for n answers and choose",
    "functions": "kvpool has no grammars, so it cannot promise that a call is well-formed",
    "guided_json": "kvpool has no grammars",
    "response_format": "kvpool has no grammars, so only text can be promised",
    "structured_outputs": "kvpool has no grammars, so only text can be promised",
    "suffix": "the models behind this gateway continue a prompt; they do not fill a gap",
    "tool_choice": "kvpool has no grammars, so no tool can be forced",
    "tools": "kvpool has no grammars, so it cannot promise that a call is well-formed",
}


def check_other_fields(body: Body, *, ignore: bool) -> dict[str, str]:
    """Refuse fields that ask for something kvpool cannot do. Raises ApiError; with `ignore` returns a header that lists them."""
    ignored = []
    for name, value in _others(body):
        as_usual = _AS_USUAL.get(name)
        if value is None or (as_usual is not None and as_usual(value)):
            continue
        if not ignore:
            raise _refusal(name, known=name in _AS_USUAL or name in _WHY)
        ignored.append(name.encode("ascii", "replace").decode())
    header = ", ".join("".join(c for c in name if c.isprintable()) for name in ignored)
    return {IGNORED_HEADER: header[:MAX_IGNORED_BYTES]} if ignored else {}


def _others(part: BaseModel, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields that the model lacks, at any depth, by their path; not those of messages, which a template may read."""
    for name, value in (part.model_extra or {}).items():
        yield path + name, value
    for name in part.model_fields_set & type(part).model_fields.keys():
        if isinstance(inner := getattr(part, name), BaseModel):
            yield from _others(inner, f"{path}{name}.")


def _refusal(name: str, *, known: bool) -> ApiError:
    why = _WHY.get(name)
    if why is None:
        why = (
            "only its default is supported"
            if known
            else "kvpool does not know this field; leave it out, or start the gateway with --ignore-unknown-fields"
        )
    shown = name[:128]
    return ApiError(
        HTTPStatus.BAD_REQUEST,
        f"{shown} is not supported: {why}",
        param=shown.partition(".")[0],
        code="unsupported_parameter" if known else "unknown_parameter",
    )
