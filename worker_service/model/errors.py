"""Errors of a model or its settings, also those that a library raises while a model is loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

import structlog


class NotNative(Exception):
    """The native step cannot compute this model, or not here; the message is the reason, for one line of the log."""


class ModelError(RuntimeError):
    """The model cannot be served. The message says what was needed, what there is, and what to change."""


class UnsupportedModel(ModelError):
    """Paged attention over packed rows would compute this architecture wrongly."""


class KVCacheTooLarge(ModelError):
    """The requested KV cache does not fit into the device's memory."""


_LONGEST = 400
"""Characters of a library's message that are shown."""


@contextmanager
def library_errors(what: str, advice: str = "") -> Iterator[None]:
    """Raise ModelError, with the library's message after `what`, for an error that a library raises inside.

    An error that our own code raises is a mistake of ours and passes as it is. The traceback of a library's error is logged
    at the level debug.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if _is_ours(error):
            raise
        structlog.get_logger("kvpool.model").debug("a library's error", exc_info=error)
        raise ModelError(f"{what}: {one_line(error)}{'.' if advice else ''} {advice}".rstrip()) from error


def one_line(error: Exception) -> str:
    """Class and message of the error, in one line of bounded length."""
    text = " ".join(str(error).split())
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
    return f"{type(error).__name__}: {shown}".rstrip(": .")


def _is_ours(error: Exception) -> bool:
    """Whether a line of ours raised the error, or called Python's own library wrongly. What the system refuses is no mistake."""
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    culprit = next((name for name in reversed(packages) if name not in sys.stdlib_module_names), "")
    return culprit == "kvpool" and not isinstance(error, OSError)
