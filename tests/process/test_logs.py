"""The log of a service: what it says, and what it need not; gRPC's C core writes to stderr too."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.python_program import run_python

PRELUDE = """
import logging, structlog
from kvpool.process.logs import LogFormat, LogLevel, configure_logging, identify_log_lines
configure_logging(LogFormat.{form}, LogLevel.{level})
"""


def logged(script: str, *, form: str = "json", level: str = "info") -> str:
    """What a process logs that configures its log and runs the script."""
    done = run_python("-c", PRELUDE.format(form=form, level=level) + script)
    assert done.returncode == 0, done.stderr
    return done.stderr


def lines(script: str, **configured: str) -> list[dict[str, Any]]:
    """The same, of JSON lines."""
    return [json.loads(line) for line in logged(script, **configured).splitlines()]


def test_a_caller_that_leaves_as_it_is_answered_is_no_error() -> None:
    """grpc.aio logs it with a traceback; what it logs of a servicer that fails stays as it is."""
    script = """
grpc = logging.getLogger("grpc._cython.cygrpc")
try:
    raise RuntimeError("Failed execute_batch")
except RuntimeError:
    grpc.exception("ExecuteBatchError raised in core by servicer method [/kvpool.v1.WorkerService/Generate]")
    grpc.exception("Failed sending error status from server")
    grpc.exception("Unexpected [RuntimeError] raised by servicer method [/kvpool.v1.WorkerService/Generate]")
"""
    (line,) = lines(script)
    assert line["event"].startswith("Unexpected")
    assert line["level"] == "error"
    assert line["exception"]
    *left, failed = lines(script, level="debug")
    assert [line["level"] for line in (*left, failed)] == ["debug", "debug", "error"]
    assert not any("exception" in line for line in left)


def test_json_lines_name_their_process() -> None:
    """Those of libraries too; what a line says itself counts more."""
    script = """
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


HOSTILE = "[/x]\x1b]0;PWN\x07\x1b[31m\x9b2J\u202egnp\u2028two\nlines\r\x7f\x85"
SHOWN = HOSTILE.encode("unicode_escape").decode()
NAMES = f"""
name = {HOSTILE!r}
log = structlog.get_logger("kvpool.manager")
log.info("registered", worker_id=name, names=[name], by_name={{name: name}})
log.warning(f"event {{name}}")
logging.getLogger("grpc").warning("a line of a library: %s", name)
def execute(request):
    raise RuntimeError(name)
try:
    execute(" ".join(["not", "for", "the", "log"]))
except RuntimeError as error:
    log.exception("failed", error=error)
    logging.getLogger("asyncio").exception("a task failed")
"""


def test_names_of_others_do_nothing_in_a_log_for_people() -> None:
    """Neither to the terminal nor to the lines: each event is one; a traceback has the lines of its error, and shows no local
    variables, among which are prompts and session keys."""
    text = logged(NAMES, form="console", level="debug")
    assert not {character for character in text if not (character.isprintable() or character == "\n")}
    found = text.splitlines()
    assert sum("PWN" in line for line in found) >= 5
    assert "Traceback (most recent call last):" in found
    assert "not for the log" not in text
    for words in (f"worker_id={SHOWN}", f"event {SHOWN}", f"a line of a library: {SHOWN}"):
        assert any(words in line for line in found)


def test_names_of_others_do_nothing_in_a_log_for_programs() -> None:
    """JSON is plain ASCII, one object per line, and the names in it are the names."""
    text = logged(NAMES, level="debug")
    assert all(byte == 0x0A or 0x20 <= byte < 0x7F for byte in text.encode())
    found = [json.loads(line) for line in text.splitlines()]
    assert len(found) == 5
    assert "not for the log" not in text
    assert found[0]["worker_id"] == HOSTILE
    assert found[1]["event"] == f"event {HOSTILE}"


SERVE = """
import asyncio
{first}
import grpc.aio
from tests import http2

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with await http2.Connection.open(port) as connection:
        fields = [(b":method", b"GOT"), (b":scheme", b"http"), (b":path", b"/x"), (b"content-type", b"application/grpc")]
        await connection.send(http2.headers(b"".join(http2.literal(*field) for field in fields), 1, 5))
        while (frame := await connection.read()) is not None and frame.kind not in (http2.Kind.HEADERS, http2.Kind.RST_STREAM):
            pass
    await server.stop(0)

asyncio.run(main())
"""


@pytest.mark.parametrize(("first", "is_quiet"), [("", False), ("import kvpool.process.quiet_core", True)])
def test_a_peer_s_headers_write_nothing_into_the_log_of_a_service(first: str, is_quiet: bool) -> None:
    """Without it there is a line for each of them: should gRPC stop that, the module can go."""
    done = run_python("-c", SERVE.format(first=first))
    assert done.returncode == 0, done.stderr
    assert ("hpack_parser" not in done.stderr) is is_quiet, done.stderr
