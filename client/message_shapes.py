"""Finds the shape in which a chat template reads messages: contents as text or as parts, a tool's arguments as JSON text or as a
mapping.

OpenAI's API allows both shapes of a content, and sends arguments as text. Most templates read one shape only: the other gives an
error, its Python notation, or nothing. So the template is tried on the same messages in each shape, with marks in place of contents
and arguments. It reads the shape whose marks come out as they should.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from .errors import InvalidRequest
from .messages import Message

Render = Callable[[Sequence[Message]], str | None]
"""Renders messages; None: the template fails or refuses."""

_KNOWN_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that are tried one by one; all others are tried together, because a request may name any number."""


class MessageShapes(NamedTuple):
    """The shapes in which a template reads certain messages."""

    reads_text: frozenset[int] = frozenset()
    """Indices of the messages whose content it reads as text."""
    reads_parts: frozenset[int] = frozenset()
    arguments_as_text: bool = False
    arguments_as_mapping: bool = False
    developer: str = "developer"
    """Role under which it reads messages of the developer."""
    empty: str | None = None
    """Text in place of a missing content; None: the content stays missing."""

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """Return copies of the messages as the template reads them. InvalidRequest if arguments must be a mapping and are not."""
        return [self._shaped(index, message) for index, message in enumerate(messages)]

    def _shaped(self, index: int, message: Message) -> Message:
        shaped = dict(message)
        if message["role"] == "developer":
            shaped["role"] = self.developer
        content = message.get("content")
        if isinstance(content, list) and index not in self.reads_parts:
            shaped["content"] = "\n".join(part["text"] for part in content)
        elif isinstance(content, str) and index in self.reads_parts and index not in self.reads_text:
            shaped["content"] = _parts(content)
        elif content is None and self.empty is not None:
            shaped["content"] = self.empty if self.reads_text else _parts(self.empty)
        if calls := _calls(message):
            shaped["tool_calls"] = [self._shaped_call(index, call) for call in calls]
        return shaped

    def _shaped_call(self, index: int, call: Any) -> Any:
        arguments = _arguments(call)
        if isinstance(arguments, str) and self.arguments_as_mapping and not self.arguments_as_text:
            return _with_arguments(call, _mapping(index, arguments))
        if isinstance(arguments, dict) and self.arguments_as_text and not self.arguments_as_mapping:
            return _with_arguments(call, json.dumps(arguments, ensure_ascii=False))
        return call


def structure(messages: Sequence[Message]) -> tuple[tuple[str, str], ...] | None:
    """Return role and content type of each message; None: there are other keys, on which the shapes may depend too."""
    if any(message.keys() - {"role", "content"} for message in messages):
        return None
    return tuple((message["role"], type(message.get("content")).__name__) for message in messages)


def find_shapes(messages: Sequence[Message], render: Render) -> MessageShapes | None:
    """Try the template in a few short renderings, however long the contents are. None: it renders no messages of these roles."""
    shapes = _shapes_of(_Trial(messages, render))
    if shapes is None and any(message.get("content") is None for message in messages):
        shapes = _shapes_of(_Trial(messages, render, empty=""))
    developers = {index for index, message in enumerate(messages) if message["role"] == "developer"}
    if developers and (shapes is None or not developers & (shapes.reads_text | shapes.reads_parts)):
        # A template that does not know the role drops its words, or refuses.
        empty = None if shapes is None else shapes.empty
        shapes = _shapes_of(_Trial(messages, render, developer="system", empty=empty)) or shapes
    return shapes


def _shapes_of(trial: _Trial) -> MessageShapes | None:
    """Return the shapes that a trial shows; None: it renders nothing."""
    messages, nothing, everything = trial.messages, frozenset[int](), frozenset(range(len(trial.messages)))
    as_text = as_mapping = False
    if any(_arguments(call) is not None for message in messages for call in _calls(message)):
        for indices in (nothing, everything):
            as_text |= trial.reads_arguments(indices, mapping=False)
            as_mapping |= trial.reads_arguments(indices, mapping=True)
            if as_text or as_mapping:
                break
    mapping = as_mapping and not as_text
    reads_text, reads_parts = trial.read(nothing, mapping), frozenset[int]()
    if any(isinstance(message.get("content"), list) for message in messages) or not trial.said <= reads_text:
        reads_parts = trial.read(everything, mapping)
        by_role = _by_role(messages)
        # One role may be read as text and another one as parts.
        if trial.render(nothing, mapping) is None:
            reads_text = reads_text.union(*(trial.read(everything - role, mapping) & role for role in by_role))
        if trial.render(everything, mapping) is None:
            reads_parts = reads_parts.union(*(trial.read(role, mapping) & role for role in by_role))
    if not trial.has_rendered:
        return None
    return MessageShapes(reads_text, reads_parts, as_text, as_mapping, trial.developer, trial.empty)


class _Trial:
    """Messages with random marks in place of their contents: no author of a message can have written such a mark."""

    def __init__(
        self, messages: Sequence[Message], render: Render, *, developer: str = "developer", empty: str | None = None
    ) -> None:
        self.messages = messages
        self.developer = developer
        self.empty = empty
        self.said = {index for index, message in enumerate(messages) if isinstance(message.get("content"), str | list)}
        self.has_rendered = False
        self._render = render
        self._mark = secrets.token_hex(4)
        self._arguments = json.dumps({f"{self._mark}k": f"{self._mark}v"})
        self._rendered: dict[tuple[frozenset[int], bool], str | None] = {}

    def render(self, parts: frozenset[int], mapping: bool) -> str | None:
        """Render the marked messages. `parts`: indices of those whose content is a list of parts; `mapping`: arguments are
        mappings."""
        key = parts, mapping
        if key not in self._rendered:
            marked = [self._marked(index, index in parts, mapping) for index in range(len(self.messages))]
            self._rendered[key] = self._render(marked)
            self.has_rendered = self.has_rendered or self._rendered[key] is not None
        return self._rendered[key]

    def read(self, parts: frozenset[int], mapping: bool) -> frozenset[int]:
        """Return the indices of the messages whose text comes out without the other keys of their parts."""
        rendered = self.render(parts, mapping) or ""
        words, others = (
            {int(index) for index in re.findall(rf"{self._mark}{kind}(\d+)z", rendered, re.IGNORECASE)}
            for kind in ("w", "o")
        )
        return frozenset(words - others)

    def reads_arguments(self, parts: frozenset[int], *, mapping: bool) -> bool:
        """Whether arguments come out as JSON, or key by key, and not as Python writes a mapping or as JSON in JSON."""
        rendered = self.render(parts, mapping) or ""
        if not mapping:
            return self._arguments in rendered
        return f"{self._mark}v" in rendered and f"'{self._mark}k'" not in rendered

    def _marked(self, index: int, as_parts: bool, mapping: bool) -> Message:
        message = dict(self.messages[index])
        if message["role"] == "developer":
            message["role"] = self.developer
        if index in self.said:
            mark = f"{self._mark}w{index}z"
            # The other key comes out where the whole list is printed.
            part = {"type": "text", "text": mark, "other": f"{self._mark}o{index}z"}
            message["content"] = [part] if as_parts else mark
        elif message.get("content") is None and self.empty is not None:
            message["content"] = _parts(self.empty) if as_parts else self.empty
        if calls := _calls(message):
            arguments = json.loads(self._arguments) if mapping else self._arguments
            message["tool_calls"] = [
                call if _arguments(call) is None else _with_arguments(call, arguments) for call in calls
            ]
        return message


def _by_role(messages: Sequence[Message]) -> Iterable[frozenset[int]]:
    indices_by_role: dict[str, set[int]] = {}
    for index, message in enumerate(messages):
        role = message["role"] if message["role"] in _KNOWN_ROLES else ""
        indices_by_role.setdefault(role, set()).add(index)
    return [frozenset(indices) for indices in indices_by_role.values()]


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _calls(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _arguments(call: Any) -> str | dict[str, Any] | None:
    """Return a tool call's arguments; None: it has none, or they have an unknown form."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return arguments if isinstance(arguments, str | dict) else None


def _with_arguments(call: Any, arguments: Any) -> Any:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _mapping(index: int, arguments: str) -> dict[str, Any]:
    try:
        mapping = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        mapping = None
    if not isinstance(mapping, dict):
        raise InvalidRequest(
            f"message {index} has a tool call whose arguments are no JSON object, which the model's chat template reads; "
            'send them as OpenAI does: "{\\"name\\": value}"',
            reason="BAD_FIELD",
        )
    return mapping
