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
"""Of one conversation: roles are named by requests."""


class ChatTemplate:
    """A template comes out of a model folder, so it is a stranger's program. It is compiled and rendered in a process of its own,
    which has bounds of memory and time; there it sees the messages and plain helpers, no Python internals, and its text is
    bounded."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        process: TemplateProcess | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`process`: where it is rendered; None: in one of its own, started with the first rendering."""
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
        """The prompt for `messages`, which as_messages() has checked, in the shape that the template reads; special tokens are in
        it as text. `arguments` are more variables for the template (tools, documents, enable_thinking, …). Blocking: milliseconds;
        seconds for a hostile template. InvalidRequest if the source is no template, or if it refuses, fails, or exceeds its
        bounds."""
        shaped = self._shapes(messages, add_generation_prompt, arguments).apply(messages)
        return self._render(shaped, add_generation_prompt, arguments)

    def _shapes(
        self, messages: Sequence[Message], add_generation_prompt: bool, arguments: Mapping[str, Any] | None
    ) -> MessageShapes:
        """Those in which it reads the messages; they are kept for the structures seen last."""
        key = None if arguments else structure(messages)
        known = None if key is None else self._known.pop(key, None)
        if known is None:

            def render(trial: Sequence[Message]) -> str | None:
                try:
                    return self._render(trial, add_generation_prompt, arguments)
                except TemplateExceeded:
                    raise
                except InvalidRequest as error:
                    if error.reason != "BAD_TEMPLATE":
                        raise
                    return None

            known = find_shapes(messages, render)
        if known is None:
            return MessageShapes()
        if key is not None and len(key) <= _MOST_KEPT_MESSAGES:
            self._known[key] = known
            while len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
        return known

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
