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
    grpc.exception("Failed sending error status from server")
    grpc.exception("Unexpected [RuntimeError] raised by servicer method [/kvpool.v1.WorkerService/Generate]")
"""


def logged(script: str) -> str:
    """What a process that runs the script logs."""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr


def lines(script: str) -> list[dict[str, Any]]:
    """The same, of JSON lines."""
    return [json.loads(line) for line in logged(script).splitlines()]


def test_a_caller_that_leaves_as_it_is_answered_is_no_error() -> None:
    """grpc.aio tells of it with a traceback; what it tells of a servicer that fails stays as it is."""
    (line,) = lines(SCRIPT.format(level="info"))
    assert line["event"].startswith("Unexpected")
    assert line["level"] == "error"
    assert line["exception"]
    *left, failed = lines(SCRIPT.format(level="debug"))
    assert [line["level"] for line in (*left, failed)] == ["debug", "debug", "error"]
    assert not any("exception" in line for line in left)


def test_json_lines_name_their_process() -> None:
    """Those of libraries too; what a line says itself counts more."""
    script = """
import logging, structlog
from kvpool.process.logs import LogFormat, LogLevel, configure_logging, identify_log_lines
configure_logging(LogFormat.json, LogLevel.info)
identify_log_lines(service="worker")
structlog.get_logger("kvpool").info("first")
identify_log_lines(worker_id="w")
logging.getLogger("grpc").warning("second")
structlog.get_logger("kvpool").info("third", worker_id="other")
"""
    assert [(line["event"], line["service"], line.get("worker_id")) for line in lines(script)] == [
        ("first", "worker", None),
        ("second", "worker", "w"),
        ("third", "worker", "other"),
    ]


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
    text = logged(SECRETIVE.format(format=log_format))
    assert "a defect" in text
    assert "what must not be read" not in text


HOSTILE = "[/x]\x1b]0;PWN\x07\x1b[31m\x9b2J\u202egnp\u2028two\nlines\r\x7f\x85"
NAMES = f"""
import logging, structlog
from kvpool.process.logs import LogFormat, LogLevel, configure_logging
configure_logging(LogFormat.{{form}}, LogLevel.debug)
name = {HOSTILE!r}
log = structlog.get_logger("kvpool.manager")
log.info("registered", worker_id=name, names=[name], by_name={{{{name: name}}}})
log.warning(f"event {{{{name}}}}")
logging.getLogger("grpc").warning("a line of a library: %s", name)
try:
    raise RuntimeError(name)
except RuntimeError as error:
    log.exception("failed", error=error)
    logging.getLogger("asyncio").exception("a task failed")
"""


def test_names_of_others_do_nothing_in_a_log_for_people() -> None:
    """Neither to the terminal nor to the lines: each event is one; a traceback has the lines of its error."""
    text = logged(NAMES.format(form="console"))
    assert not {character for character in text if not (character.isprintable() or character == "\n")}
    lines = text.splitlines()
    assert sum("PWN" in line for line in lines) >= 5
    assert "Traceback (most recent call last):" in lines
    shown = HOSTILE.encode("unicode_escape").decode()
    assert any(f"worker_id={shown}" in line for line in lines)
    assert any(f"event {shown}" in line for line in lines)
    assert any(f"a line of a library: {shown}" in line for line in lines)
    assert "name = " not in text  # values of variables are not logged: there are prompts among them


def test_names_of_others_do_nothing_in_a_log_for_programs() -> None:
    """JSON is plain ASCII, one object per line, and the names in it are the names."""
    text = logged(NAMES.format(form="json"))
    assert all(byte == 0x0A or 0x20 <= byte < 0x7F for byte in text.encode())
    found = [json.loads(line) for line in text.splitlines()]
    assert len(found) == 5
    assert found[0]["worker_id"] == HOSTILE
    assert found[1]["event"] == f"event {HOSTILE}"
