"""A model's chat template, rendered where it can do no harm."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import InvalidRequest

MAX_RENDERED_CHARS: Final = 16 * 1024 * 1024
MAX_REPEATED_CHARS: Final = 1024 * 1024

Message = Mapping[str, Any]
"""One turn of a chat: {"role": …, "content": …} and whatever else the model's template knows."""


class ChatTemplate:
    """A compiled template. It comes out of a model folder, so it is a stranger's program: it sees the messages and
    plain helpers, no Python internals, changes nothing that it is given, and its text is bounded. Its time is not:
    render it off the event loop.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile. InvalidRequest if the source is no template."""
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template does not compile: {error}", reason="BAD_TEMPLATE"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`; special tokens stand in it as text. `arguments` are further variables that the
        template may know (tools, documents, enable_thinking, …). InvalidRequest if the template refuses."""
        if not messages:
            raise InvalidRequest("a chat needs at least one message", reason="BAD_FIELD")
        for index, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise InvalidRequest(f"message {index} needs a role: user, assistant or system", reason="BAD_FIELD")
        variables = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **(arguments or {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise InvalidRequest(
                        f"the chat template rendered more than {MAX_RENDERED_CHARS} characters", reason="BAD_TEMPLATE"
                    )
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refused: {error}", reason="BAD_TEMPLATE") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
            # The template is a program and may fail like one; that is no defect of this client.
            raise InvalidRequest(
                f"the model's chat template failed: {type(error).__name__}: {error}", reason="BAD_TEMPLATE"
            ) from error
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses also the cheapest ways to eat all memory: 'a' * 10**10 and 10 ** 10**10."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int) and abs(right) > 1024:
            raise jinja2.exceptions.SecurityError(f"an exponent of {right} is too large")
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                repeats = isinstance(count, int) and isinstance(text, str | bytes | list | tuple)
                if repeats and len(text) * count > MAX_REPEATED_CHARS:
                    raise jinja2.exceptions.SecurityError(f"a repetition of {len(text)} × {count} is too long")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks the assistant's own text for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 — the name and form that jinja2 reads

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML; a prompt must hold them as they are.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
