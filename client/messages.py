"""Checks the messages of a chat and brings them into the form that templates read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from .errors import InvalidRequest

Message = Mapping[str, Any]
"""One turn of a chat: {"role": …, "content": …} and other keys that the model's template knows; JSON values."""

_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning."""


def as_messages(messages: Iterable[Message]) -> tuple[dict[str, Any], ...]:
    """Return copies of the messages as transformers gives them to templates: keys that are null are left out, and reasoning has all
    of its names. A content that is a list of parts remains one; a refusal in it becomes text. InvalidRequest says which message is
    wrong, and how."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise InvalidRequest(
            f'a chat is a list of messages such as {{"role": "user", "content": "…"}}, got {type(messages).__name__}; '
            "use generate() for a raw prompt",
            reason="BAD_FIELD",
        )
    checked = tuple(_as_message(index, message) for index, message in enumerate(messages))
    if not checked:
        raise InvalidRequest("a chat needs at least one message", reason="BAD_FIELD")
    return checked


def _as_message(index: int, message: Message) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not (isinstance(role, str) and role):
        raise InvalidRequest(
            f'message {index} needs a role (user, assistant or system) and a content: {{"role": "user", "content": "…"}}',
            reason="BAD_FIELD",
        )
    fields = {key: value for key, value in message.items() if value is not None}
    if isinstance(fields.get("content"), list):
        fields["content"] = [_as_text_part(index, part) for part in fields["content"]]
    if isinstance(fields.get("tool_calls"), list):
        fields["tool_calls"] = [_without_nulls(call) for call in fields["tool_calls"]]
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _as_text_part(index: int, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(kind) if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        named = f" ({kind[:64]})" if isinstance(kind, str) and kind != "text" else ""
        raise InvalidRequest(
            f'message {index} has a part that is no text{named}; only {{"type": "text", "text": "…"}} can be sent to a text model',
            reason="BAD_FIELD",
        )
    return dict(part) if kind == "text" else {"type": "text", "text": text}


def _without_nulls(call: Any) -> Any:
    """Leave out the keys of a tool call and of its function that are null."""
    if not isinstance(call, Mapping):
        return call
    return {
        key: _without_nulls(value) if key == "function" else value for key, value in call.items() if value is not None
    }
