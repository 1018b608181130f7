"""The log of a service: what it says, and what it need not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import logging
from kvpool.process.logs import LogFormat, LogLevel, configure_logging
configure_logging(LogFormat.json, LogLevel.{level})
grpc = logging.getLogger("grpc._cython.cygrpc")
try:
    raise RuntimeError("Failed execute_batch")
except RuntimeError:
    grpc.exception("ExecuteBatchError raised in core by servicer method [/kvpool.v1.WorkerService/Generate]")
    grpc.exception("Unexpected [RuntimeError] raised by servicer method [/kvpool.v1.WorkerService/Generate]")
"""


def lines(level: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(level=level)], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_caller_that_leaves_as_it_is_answered_is_no_error() -> None:
    """grpc.aio tells of it with a traceback; what it tells of a servicer that fails stays as it is."""
    (line,) = lines("info")
    assert line["event"].startswith("Unexpected")
    assert line["level"] == "error"
    assert line["exception"]
    left, failed = lines("debug")
    assert (left["level"], failed["level"]) == ("debug", "error")
    assert "exception" not in left


SECRETIVE = """
import structlog
from kvpool.process.logs import LogFormat, LogLevel, configure_logging
configure_logging(LogFormat.{format}, LogLevel.info)
def execute(request):
    raise RuntimeError("a defect")
try:
    execute("what must not be read")
except RuntimeError:
    structlog.get_logger("kvpool").exception("call failed")
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_shows_no_values(log_format: str) -> None:
    """Among the local variables of a call that fails are prompts and session keys."""
    done = subprocess.run(
        [sys.executable, "-c", SECRETIVE.format(format=log_format)], capture_output=True, text=True, check=True
    )
    assert "a defect" in done.stderr
    assert "what must not be read" not in done.stderr
