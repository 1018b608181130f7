"""The program that renders chat templates: a child process of the client, which bounds its memory and its time.

It reads requests from stdin and answers on stdout, each a frame: the length as 8 big-endian bytes, then JSON. It ends with stdin.
The client starts this file by its path, not as a module of its package: it imports jinja2 and nothing of kvpool, so it is ready in
a tenth of a second.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARS: Final = 16 * 1024 * 1024
MAX_REPEATED_CHARS: Final = 1024 * 1024
MAX_ERROR_CHARS: Final = 1000
MAX_COMPILED: Final = 16
MEMORY_BYTES: Final = 256 * 1024 * 1024
"""Address space that one rendering may take on top of its request."""
CPU_SECONDS: Final = 2.0
"""CPU time that one rendering may take. It is the same by the clock while the process has a core to itself: it has one thread, and
nothing in a template sleeps or waits for I/O."""
WALL_SECONDS: Final = 10.0
"""Limit by the clock. Longer than CPU_SECONDS because a process that waits for a core, or is stopped, computes nothing: a limit of
2 s would refuse good templates on a busy machine, and no template can make use of the difference."""
LENGTH_BYTES: Final = 8


def render(request: dict[str, Any], compiled: Callable[[str], jinja2.Template]) -> dict[str, str]:
    """Render one request. Returns `text`, or `refused`, `failed` or `exceeded` with a sentence."""
    try:
        template = compiled(request["source"])
    except jinja2.TemplateError as error:
        return {"failed": f"does not compile: {error}"}
    except (RecursionError, ValueError, OverflowError) as error:
        return {"failed": f"does not compile: {type(error).__name__}: {error}"}
    now = datetime.fromisoformat(request["now"])
    pieces: list[str] = []
    num_chars = 0
    try:
        for piece in template.generate({"strftime_now": now.strftime, **request["variables"]}):
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS:
                return {"exceeded": f"rendered more than {MAX_RENDERED_CHARS} characters"}
            pieces.append(piece)
    except jinja2.TemplateError as error:
        return {"refused": f"{error}"}
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
        return {"failed": f"failed: {type(error).__name__}: {error}"}
    return {"text": "".join(pieces)}


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that also refuses the cheapest ways to use up all memory: 'a' * 10**10 and 10 ** 10**10."""

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


def environment() -> jinja2.Environment:
    """Make the environment of templates: plain helpers and no Python internals. Templates cannot change their variables."""
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise_exception
    return sandbox


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


def _address_space() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _bound() -> None:
    """Limit memory and time from now on. Too long a computation ends the process by a signal."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _address_space() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)


def _unbound() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _read(stream: BinaryIO) -> Any:
    header = stream.read(LENGTH_BYTES)
    content = stream.read(int.from_bytes(header, "big"))
    return json.loads(content) if len(header) == LENGTH_BYTES else None


def _write(stream: BinaryIO, answer: dict[str, str]) -> None:
    content = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    stream.write(len(content).to_bytes(LENGTH_BYTES, "big") + content)
    stream.flush()


def main() -> None:
    """Answer requests until stdin ends."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)  # it may be ignored or blocked in the process that started this one
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    compiled = functools.lru_cache(MAX_COMPILED)(environment().from_string)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    most_when_idle = _address_space() + MEMORY_BYTES
    _write(answers, {"ready": ""})
    while (request := _read(requests)) is not None:
        _bound()
        try:
            answer = render(request, compiled)
        except MemoryError:
            answer = {"exceeded": f"needed more than {MEMORY_BYTES >> 20} MiB of memory"}
        _unbound()
        if "text" not in answer:
            answer = {kind: sentence[:MAX_ERROR_CHARS] for kind, sentence in answer.items()}
        del request
        _write(answers, answer)
        if "exceeded" in answer or _address_space() > most_when_idle:
            return  # the next one begins with a clean process
        del answer


if __name__ == "__main__":
    main()
