"""The bodies of requests: one model for each route, with OpenAI's names and, where OpenAI has none, vLLM's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.requests import Request

from kvpool.client.options import SamplingOptions

from ..errors import ApiError

MAX_LOGPROBS: Final = 20
MAX_NAME_CHARACTERS: Final = 1024
"""Longest name of a model, which is repeated in answers."""
MAX_VALUES: Final = 1 << 19
"""Values in all lists and objects of one body. They are made in one go, a few microseconds each, while all other callers wait."""
MAX_KEYS: Final = 1 << 15
"""Keys in all objects of one body. A key costs ten times as much as a value."""
_MAX_SHOWN: Final = 256
_STRINGS_AT_ONCE: Final = 2048
_NOT_BEFORE_VALUES: Final = bytes(set(range(256)) - set(b",[{"))
_REST_OF_STRING: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)

_UNION_MEMBERS: Final = frozenset({"str", "list[dict[str,any]]", "list[int]", "list[str]", "list[list[int]]", "int"})
"""Pydantic's names for the members of the unions `stop` and `prompt` in the location of an error."""

Number = Annotated[float, Field(allow_inf_nan=False)]
# Without fail_fast all errors of a list would be collected, although only the first one is shown.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
ListsOfTokenIds = Annotated[list[TokenIds], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    """The field stream_options."""

    model_config = ConfigDict(extra="allow", strict=True)
    continuous_usage_stats: bool | None = None
    """Whether each chunk has usage, as in vLLM; needs include_usage."""
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Ignored: OpenAI pads chunks at random to hide their length, kvpool does not."""


class Body(BaseModel):
    """The fields of all bodies. Others are kept in `model_extra`, see fields.py."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())
    model: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = None
    """Name or fingerprint of the model; None: the one that all workers serve."""


_JSON_TYPES: Final[Mapping[Any, Any]] = {
    float: Number,
    int: Annotated[int, Field(ge=0)],
    Sequence[int]: TokenIds,
    Sequence[Sequence[int]]: ListsOfTokenIds,
    int | Sequence[int]: int | TokenIds,
    Mapping[int, float]: dict[str, Number],  # keys are text, as all of JSON's
}
"""Types of fields by those of the client's options."""
_OWN_TYPES: Final = {
    "seed": Annotated[int, Field(ge=-(2**63), lt=2**64)],
    "top_k": Annotated[int, Field(ge=-1)],
}
"""Types of the fields that may have other values than the options of the same name."""

if TYPE_CHECKING:
    SamplingBody = Body
else:
    SamplingBody = create_model(
        "SamplingBody",
        __base__=Body,
        **{
            name: ((_OWN_TYPES.get(name) or _JSON_TYPES[kind]) | None, None)
            for name, kind in get_type_hints(SamplingOptions).items()
        },
    )
    """The client's sampling options, all of which are fields. Those that OpenAI lacks have the names of vLLM and transformers."""


class GenerationBody(SamplingBody):
    """The fields that chats and completions have in common. Any may be null, which means its default."""

    early_stopping: bool | Literal["never"] | None = None
    ignore_eos: bool | None = None
    length_penalty: Number | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    min_tokens: int | None = Field(default=None, ge=0)
    n: int | None = Field(default=None, ge=1)
    num_beams: int | None = Field(default=None, ge=1)
    """Named as in transformers; vLLM has use_beam_search, with n as the number of beams."""
    priority: int | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    use_beam_search: bool | None = None
    user: str | None = None
    cache_salt: str | None = None


class ChatMessage(BaseModel):
    """One turn of a chat. The model's template may read other keys."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


Messages = Annotated[list[ChatMessage], Field(fail_fast=True)]


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: str | TokenIds | Texts | ListsOfTokenIds
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)


class TokenizeBody(Body):
    """The body of POST /tokenize: a prompt or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    tokens: TokenIds


B = TypeVar("B", bound=BaseModel)


def plain(messages: Iterable[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as they were sent."""
    return [message.model_dump(exclude_unset=True) for message in messages]


async def read_body(request: Request, kind: type[B]) -> B:
    """Read the body of a request. Raises ApiError, which names the first wrong field."""
    raw = bytearray()
    async for part in request.stream():  # not body(): it would keep it for as long as the answer lasts
        raw += part
    await _require_countable(raw)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        # Only the first error is shown; each member of a union has one.
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = [str(part) for part in first["loc"] if part not in _UNION_MEMBERS]
        if first["type"] == "json_invalid":
            raise ApiError(
                HTTPStatus.BAD_REQUEST, f"the body is not JSON: {first['msg']}", code="invalid_json"
            ) from None
        place = ".".join(path)[:_MAX_SHOWN]
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            f"{place}: {first['msg']}" if place else f"the body: {first['msg']}",
            param=path[0][:_MAX_SHOWN] if path else None,
            code="missing" if first["type"] == "missing" else "invalid_value",
        ) from None


async def _require_countable(raw: bytearray) -> None:
    """Raise ApiError for a body with too many values or keys. If it seems to have too many, those within strings are left out of
    the count; other requests are served meanwhile."""
    if len(raw.translate(None, _NOT_BEFORE_VALUES)) <= MAX_VALUES and raw.count(b":") <= MAX_KEYS:
        return
    num_values = num_keys = num_strings = start = 0
    while start < len(raw):
        end = raw.find(b'"', start)
        outside = raw[start:end] if end >= 0 else raw[start:]
        num_values += len(outside.translate(None, _NOT_BEFORE_VALUES))
        num_keys += outside.count(b":")
        if num_values > MAX_VALUES or num_keys > MAX_KEYS:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"the body: its lists and objects may have {MAX_VALUES} values and {MAX_KEYS} keys; send fewer, or text in place "
                "of token ids",
                code="request_too_large",
            )
        string = None if end < 0 else _REST_OF_STRING.match(raw, end + 1)
        start = len(raw) if string is None else string.end()
        num_strings += 1
        if num_strings % _STRINGS_AT_ONCE == 0:
            await asyncio.sleep(0)
