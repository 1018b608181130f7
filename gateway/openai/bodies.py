"""The bodies of requests: one model for each route, with OpenAI's names and, where OpenAI has none, vLLM's."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from ..errors import ApiError

MAX_LOGPROBS: Final = 20

_UNION_MEMBERS: Final = frozenset({"str", "list[dict[str,any]]", "list[int]", "list[str]", "list[list[int]]", "int"})
"""How pydantic names the members of `stop` and `prompt` in the place of an error."""

Number = Annotated[float, Field(allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]


class StreamOptions(BaseModel):
    """stream_options."""

    model_config = ConfigDict(extra="allow", strict=True)
    continuous_usage_stats: bool | None = None
    """With include_usage: in each chunk, as vLLM has it."""
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Random padding of chunks, which hides their length: there is none here."""


class Body(BaseModel):
    """What all bodies have. Other fields are kept in `model_extra`, see fields.py."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())
    model: str | None = None
    """Name or fingerprint; None: the one that all workers serve."""


class GenerationBody(Body):
    """What chats and completions have in common. Any field may be null, which is its default."""

    bad_words_ids: list[list[int]] | None = None
    """As in transformers, like the other fields that say which ids must not, or must, follow."""
    begin_suppress_tokens: list[int] | None = None
    early_stopping: bool | Literal["never"] | None = None
    encoder_no_repeat_ngram_size: int | None = Field(default=None, ge=0)
    forced_eos_token_id: int | list[int] | None = None
    frequency_penalty: Number | None = None
    ignore_eos: bool | None = None
    length_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    """Token ids, as text because JSON's keys are."""
    max_tokens: int | None = Field(default=None, ge=0)
    min_p: Number | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    n: int | None = Field(default=None, ge=1)
    no_repeat_ngram_size: int | None = Field(default=None, ge=0)
    num_beams: int | None = Field(default=None, ge=1)
    """As in transformers; vLLM writes use_beam_search, and n for their number."""
    presence_penalty: Number | None = None
    priority: int | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    repetition_penalty: Number | None = None
    return_token_ids: bool | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    suppress_tokens: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Number | None = None
    top_k: int | None = Field(default=None, ge=-1)
    top_p: Number | None = None
    use_beam_search: bool | None = None
    user: str | None = None
    cache_salt: str | None = None


class ChatMessage(BaseModel):
    """One turn. The model's template may know other keys."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)


class TokenizeBody(Body):
    """POST /tokenize: a prompt or messages."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int]


B = TypeVar("B", bound=Body)


def plain(messages: Iterable[ChatMessage]) -> list[dict[str, Any]]:
    """As they were sent."""
    return [message.model_dump(exclude_unset=True) for message in messages]


async def read_body(request: Request, kind: type[B]) -> B:
    """The body of a request. Raises ApiError, which names the first field that is wrong."""
    raw = await request.body()
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        # The first error that is about a value; of a union each member has one.
        found = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = [str(part) for part in found["loc"] if part not in _UNION_MEMBERS]
        if found["type"] == "json_invalid":
            raise ApiError(
                HTTPStatus.BAD_REQUEST, f"the body is not JSON: {found['msg']}", code="invalid_json"
            ) from None
        place = ".".join(path)
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            f"{place}: {found['msg']}" if place else f"the body: {found['msg']}",
            param=path[0] if path else None,
            code="missing" if found["type"] == "missing" else "invalid_value",
        ) from None
