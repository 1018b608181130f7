"""A model's chat template, rendered where it can do no harm."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from .errors import InvalidRequest
from .message_shapes import MessageShapes, find_shapes, structure
from .messages import Message
from .template_process import TemplateExceeded, TemplateProcess

_MOST_KEPT: Final = 64
_MOST_KEPT_MESSAGES: Final = 256
"""Messages in the longest conversation whose shapes are kept. A request names its roles, so the key may be of any size."""


class ChatTemplate:
    """A chat template, which is an untrusted program from a model folder. It is compiled and rendered in a process of its own with
    bounds of memory and time. It sees the messages and plain helpers, no Python internals, and its text is bounded."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        process: TemplateProcess | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`process` renders it; None: a process of its own, which is started with the first rendering."""
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._process = process or TemplateProcess()
        self._now = now
        self._known: OrderedDict[tuple[tuple[str, str], ...], MessageShapes] = OrderedDict()

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Render `messages`, which as_messages() has checked, in the shape that the template reads. Special tokens are part of the
        text. `arguments` are more variables for the template (tools, documents, enable_thinking, …). Blocking: milliseconds;
        seconds for a hostile template. InvalidRequest if the source is no template, or if it refuses, fails, or exceeds its
        bounds."""
        shaped = self._shapes(messages, add_generation_prompt, arguments).apply(messages)
        return self._render(shaped, add_generation_prompt, arguments)

    def _shapes(
        self, messages: Sequence[Message], add_generation_prompt: bool, arguments: Mapping[str, Any] | None
    ) -> MessageShapes:
        """Return the shapes in which the template reads the messages. They are kept for the structures seen last."""
        key = None if arguments else structure(messages)
        shapes = None if key is None else self._known.pop(key, None)
        if shapes is None:

            def render(trial: Sequence[Message]) -> str | None:
                try:
                    return self._render(trial, add_generation_prompt, arguments)
                except TemplateExceeded:
                    raise
                except InvalidRequest as error:
                    if error.reason != "BAD_TEMPLATE":
                        raise
                    return None

            shapes = find_shapes(messages, render)
        if shapes is None:
            return MessageShapes()
        if key is not None and len(key) <= _MOST_KEPT_MESSAGES:
            self._known[key] = shapes
            while len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
        return shapes

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, arguments: Mapping[str, Any] | None
    ) -> str:
        variables = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **(arguments or {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._process.render(self._source, variables, self._now().isoformat())
