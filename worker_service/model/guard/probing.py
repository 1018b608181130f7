"""Turns an exception during a check of a model into UnsupportedModel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
import torch

from ..errors import ModelError, UnsupportedModel

_log = structlog.get_logger("kvpool.model")


@contextmanager
def probing(model: Any) -> Iterator[None]:
    """Check a model inside. Raises UnsupportedModel if it fails to run, but not if it lacks memory."""
    started = time.monotonic()
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # models raise all kinds of errors for input that they do not support
        raise UnsupportedModel(
            f"{type(model).__name__} fails to run on one packed row of tokens: {type(error).__name__}: {error}"
        ) from error
    _log.debug("probed", model=type(model).__name__, seconds=round(time.monotonic() - started, 3))
