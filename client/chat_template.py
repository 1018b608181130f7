"""A model's chat template, rendered where it can do no harm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from .messages import Message
from .template_process import TemplateProcess


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

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`, which as_messages() has checked; special tokens are in it as text. `arguments` are more
        variables for the template (tools, documents, enable_thinking, …). Blocking: milliseconds; seconds for a hostile template.
        InvalidRequest if the source is no template, or if it refuses, fails, or exceeds its bounds."""
        variables = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **(arguments or {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._process.render(self._source, variables, self._now().isoformat())
