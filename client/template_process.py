"""The process in which chat templates are rendered (`template_child.py`): started when first needed, replaced when it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Final

from . import template_child
from .errors import FailedPrecondition, InvalidRequest, ServiceError
from .template_child import CPU_SECONDS, LENGTH_BYTES, MAX_RENDERED_CHARS, WALL_SECONDS

_START_SECONDS: Final = 60.0
_ANSWER_SECONDS: Final = WALL_SECONDS + 20.0
"""Time for an answer. The child ends itself long before, unless it is stopped."""
_MAX_ANSWER_BYTES: Final = 12 * MAX_RENDERED_CHARS + 65536
"""Longest answer: JSON writes a character in at most 12 bytes."""


class TemplateExceeded(InvalidRequest):
    """A template exceeded its memory, time or length of text."""


class _Ended(Exception):
    """The child has ended, or does not answer, and was killed."""


class TemplateProcess:
    """One child process for all templates of a client, one rendering at a time. Blocking; safe to use from several threads.

    It ends with `close`, with this object, and with the interpreter; a child whose parent was killed ends by itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while a child is started, asked or ended. Only its holder closes pipes."""
        self._child: _Child | None = None
        self._ending: weakref.finalize[..., TemplateProcess] | None = None
        self._is_closed = False

    def render(self, source: str, variables: Mapping[str, Any], now: str) -> str:
        """Render the template. InvalidRequest (BAD_TEMPLATE) if it refuses, fails or exceeds its bounds; FailedPrecondition
        (CLOSED) after `close`."""
        try:
            content = json.dumps({"source": source, "variables": variables, "now": now}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"messages and template arguments must be JSON values (text, numbers, lists, objects): {error}",
                reason="BAD_FIELD",
            ) from error
        with self._lock:
            answer = self._ask(content)
        if "text" in answer:
            return answer["text"]
        if "refused" in answer:
            raise _bad_template(f"refused: {answer['refused']}")
        if "exceeded" in answer:
            raise _bad_template(answer["exceeded"], TemplateExceeded)
        raise _bad_template(" ".join(answer.values()))

    def close(self) -> None:
        """End the child, also while it renders. May be repeated."""
        self._is_closed = True
        if (child := self._child) is not None:
            child.kill()  # so that the thread that waits for its answer releases the lock
        with self._lock:
            self._end_child()

    def _ask(self, content: bytes) -> dict[str, str]:
        for is_last in (False, True):
            child = self._live_child()
            try:
                return child.ask(content)
            except _Ended:
                status = self._end_child()
                self._require_open()
                if (why := _exceeded(status)) is not None:
                    raise _bad_template(why, TemplateExceeded) from None
                # Something else has ended it: the kernel that was out of memory, or a person. Once may be chance.
                if is_last:
                    raise _bad_template(f"ended its process twice ({_describe(status)})", TemplateExceeded) from None
            except BaseException:
                self._end_child()  # an answer that was not read would be taken for the next one
                raise
        raise AssertionError("the second try returns or raises")

    def _live_child(self) -> _Child:
        self._require_open()
        if self._child is not None and self._child.is_alive():
            return self._child
        self._end_child()
        try:
            child = self._child = _Child()
        except OSError as error:
            raise _cannot_start(str(error)) from error
        # Not a method of this object: it would keep it alive. It runs at the interpreter's end too.
        self._ending = weakref.finalize(self, child.end)
        try:
            child.wait_until_ready()
        except _Ended:
            status = self._end_child()
            self._require_open()
            raise _cannot_start(_describe(status)) from None
        except BaseException:
            self._end_child()
            raise
        self._require_open()
        return child

    def _end_child(self) -> int | None:
        child, self._child = self._child, None
        if self._ending is not None:
            self._ending.detach()
        return None if child is None else child.end()

    def _require_open(self) -> None:
        if self._is_closed:
            raise FailedPrecondition("this client is closed; make a new one", reason="CLOSED")


def _bad_template(what: str, kind: type[InvalidRequest] = InvalidRequest) -> InvalidRequest:
    return kind(f"the model's chat template {what}", reason="BAD_TEMPLATE")


def _cannot_start(why: str) -> ServiceError:
    return ServiceError(
        f"the process that renders chat templates cannot be started ({why}); to see more, run: {' '.join(_COMMAND)}",
        reason="NO_TEMPLATE_PROCESS",
    )


def _exceeded(status: int | None) -> str | None:
    """Say which limit the template exceeded, if the exit status shows one."""
    if status == -signal.SIGPROF:
        return f"took more than {CPU_SECONDS:g} s of computing"
    if status == -signal.SIGALRM:
        return f"did not end within {WALL_SECONDS:g} s"
    return None


def _describe(status: int | None) -> str:
    if status is not None and status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"exit status {status}"


# -P: the folder of the file holds modules of ours, which must not take the place of others.
_COMMAND: Final = (sys.executable, "-P", template_child.__file__)


class _Child:
    """One process, and the pipes to it."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        # A session of its own: Ctrl-C and the end of the terminal are for the client, which ends it.
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._is_at_end = False
        """Whether it has closed its pipe, so that it is ending."""

    def is_alive(self) -> bool:
        """Whether it runs and can be asked. A child of the process from which this one was forked cannot."""
        return self._owner == os.getpid() and self._process.poll() is None and not self._requests.closed

    def wait_until_ready(self) -> None:
        """Wait until it has started. Raises _Ended if it does not start."""
        self._exchange(b"", _START_SECONDS)

    def ask(self, content: bytes) -> dict[str, str]:
        """Send a request and return the answer. Raises _Ended."""
        message = len(content).to_bytes(LENGTH_BYTES, "big") + content
        try:
            answer = json.loads(self._exchange(message, _ANSWER_SECONDS).decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            raise _Ended from None
        return {str(kind): str(sentence) for kind, sentence in answer.items()}

    def kill(self) -> None:
        """Kill it, and leave the rest to `end`."""
        if self._owner == os.getpid():
            self._process.kill()

    def end(self) -> int | None:
        """Kill it if it runs. Returns its exit status (−n: ended by signal n); None: another process started it. May be
        repeated."""
        if self._owner != os.getpid():
            return None
        if not self._requests.closed:
            # The own status of a child that is ending says more than that of our signal.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0 if self._is_at_end else 0)
            self._process.kill()
            self._process.wait()
            with contextlib.suppress(OSError):  # what it was not sent cannot be sent now
                self._requests.close()
            self._answers.close()
        return self._process.returncode

    def _exchange(self, message: bytes, seconds: float) -> bytes:
        """Write the message and read one frame. Raises _Ended at the end of the child; it is killed after `seconds`."""
        watchdog = threading.Timer(seconds, self._process.kill)
        watchdog.start()
        try:
            self._requests.write(message)
            self._requests.flush()
            num_bytes = int.from_bytes(self._read(LENGTH_BYTES), "big")
            if num_bytes > _MAX_ANSWER_BYTES:
                raise _Ended
            return self._read(num_bytes)
        except (OSError, ValueError):  # a pipe that was closed meanwhile is no file any more
            self._is_at_end = True
            raise _Ended from None
        finally:
            watchdog.cancel()

    def _read(self, num_bytes: int) -> bytes:
        data = self._answers.read(num_bytes)
        if len(data) < num_bytes:
            self._is_at_end = True
            raise _Ended
        return data
