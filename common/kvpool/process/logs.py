"""Log lines of a process, ours and those of libraries, in one format on stderr."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum

import structlog


class LogFormat(StrEnum):
    """How a log line looks."""

    console = "console"
    json = "json"


class LogLevel(StrEnum):
    """The least severe lines that are logged."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class _CallersThatLeave(logging.Filter):
    """grpc.aio tells it as an error, with a traceback, when a caller leaves at the very moment at which it is answered
    (https://github.com/grpc/grpc/issues/31043). Nobody has to look at that."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith("ExecuteBatchError raised in core"):
            return True
        record.levelno, record.levelname, record.exc_info = logging.DEBUG, "DEBUG", None
        return logging.getLogger().isEnabledFor(logging.DEBUG)


def configure_logging(log_format: LogFormat, log_level: LogLevel) -> None:
    """Send structlog and the standard library's logging to stderr. Call it once, at the start of the process."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Without the local variables, which structlog shows unless told otherwise: among them are prompts and session keys.
    to_dict = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    to_text = structlog.dev.RichTracebackFormatter(show_locals=False)
    renderer: list[structlog.typing.Processor] = (
        [structlog.processors.ExceptionRenderer(to_dict), structlog.processors.JSONRenderer()]
        if log_format is LogFormat.json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=to_text)]
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
