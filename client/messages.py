"""The messages of a chat, checked and in the form that templates know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .errors import InvalidRequest

Message = Mapping[str, Any]
"""One turn of a chat: {"role": …, "content": …} and other keys that the model's template knows; JSON values."""


def as_messages(messages: Iterable[Message]) -> tuple[dict[str, Any], ...]:
    """Copies of the messages. A content that is a list of text parts, as the OpenAI API has it, becomes one text, a line break
    between the parts. InvalidRequest says which message is wrong, and how."""
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
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(
            f'message {index} has a part that is no text; only {{"type": "text", "text": "…"}} can be sent to a text model',
            reason="BAD_FIELD",
        )
    return {**message, "content": "\n".join(map(str, texts))}
