"""Writes the log lines of a process, ours and those of libraries, to stderr in one format."""

from __future__ import annotations

import io
import logging
import sys
from enum import StrEnum
from typing import TextIO

import structlog

from .printable import printable, printable_lines

_OF_SEVERAL_LINES = frozenset({"exception", "stack"})


class LogFormat(StrEnum):
    console = "console"
    json = "json"


class LogLevel(StrEnum):
    """Severity of the least severe lines that are logged."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


_OF_CALLERS_THAT_LEAVE = ("ExecuteBatchError raised in core", "Failed sending error status from server")


class _CallersThatLeave(logging.Filter):
    """Turns an error that needs no attention into a debug line: grpc.aio logs it, with a traceback, when a caller leaves at the
    very moment at which it is answered (https://github.com/grpc/grpc/issues/31043)."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith(_OF_CALLERS_THAT_LEAVE):
            return True
        record.levelno, record.levelname, record.exc_info = logging.DEBUG, "DEBUG", None
        return logging.getLogger().isEnabledFor(logging.DEBUG)


def _printable(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape the fields, since lines quote other processes: a quoted text must not end a line, nor reach the terminal as a command.
    (JSON escapes everything but printable ASCII.)"""
    return {
        name: (printable_lines if name in _OF_SEVERAL_LINES else printable)(value) if isinstance(value, str) else value
        for name, value in event.items()
    }


def _traceback(stream: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    text = io.StringIO()
    # Without the values of variables: there are prompts among them.
    structlog.dev.plain_traceback(text, exc_info)
    stream.write(printable_lines(text.getvalue()))


_identity: dict[str, str] = {}
"""Fields that name the process."""


def _identified(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Add the fields that name the process, unless the line has its own."""
    return {**_identity, **event}


def identify_log_lines(**fields: str) -> None:
    """Add fields to every JSON line that this process logs from now on, e.g. its service and its worker_id."""
    _identity.update(fields)


def configure_logging(log_format: LogFormat, log_level: LogLevel) -> None:
    """Send structlog and the standard library's logging to stderr. Call it once, at the start of the process."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Without the local variables, which structlog shows by default: among them are prompts and session keys.
    to_dict = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    renderer: list[structlog.typing.Processor] = (
        [_identified, structlog.processors.ExceptionRenderer(to_dict), structlog.processors.JSONRenderer()]
        if log_format is LogFormat.json
        else [_printable, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_traceback)]
    )
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    logging.basicConfig(level=log_level.value.upper(), handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_CallersThatLeave())
