"""Python imports this at its start where this folder is on its path. It writes down which lines of the product are executed.

Each line is written when it is first executed, so a process that is killed has written what it had executed. `KVPOOL_LINES` is the
file, `KVPOOL_LINES_ROOT` the checkout; without them nothing happens. Done with sys.settrace, which needs no package. It imports
nothing else, because programs that test how they start are recorded too.
"""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

_PRODUCT = ("cache_service", "worker_service", "client", "cli", "load", "walkthrough", "gateway", "common")


class _Recorder:
    def __init__(self, file: str, root: str) -> None:
        self._file = file
        self._root = os.path.realpath(root)
        self._missing: dict[int, tuple[CodeType, str, set[int]]] = {}
        """By id of the code, which is kept with it: its path, and its lines that were not executed so far."""

    def begin(self) -> None:
        sys.settrace(self._on_call)
        threading.settrace(self._on_call)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        found = self._missing.get(id(frame.f_code)) or self._enter(frame.f_code)
        return self._on_line if found[2] else None

    def _enter(self, code: CodeType) -> tuple[CodeType, str, set[int]]:
        path = os.path.relpath(os.path.realpath(code.co_filename), self._root)
        lines: set[int] = set()
        if path.split(os.sep)[0] in _PRODUCT:
            lines = {line for _, _, line in code.co_lines() if line}
            if code.co_name != "<module>":
                lines.discard(code.co_firstlineno)  # `def`, which the module executes
        found = self._missing[id(code)] = (code, path, lines)
        return found

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            _, path, missing = self._missing[id(frame.f_code)]
            if frame.f_lineno in missing:
                missing.discard(frame.f_lineno)
                self._write(f"{path}:{frame.f_lineno}\n")
        return self._on_line

    def _write(self, line: str) -> None:
        # Opened each time: the product closes and counts descriptors, and another file could get the number of one kept open.
        try:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError:
            return  # no descriptor is left
        os.write(descriptor, line.encode())
        os.close(descriptor)


if "KVPOOL_LINES" in os.environ and "KVPOOL_LINES_ROOT" in os.environ:
    _Recorder(os.environ["KVPOOL_LINES"], os.environ["KVPOOL_LINES_ROOT"]).begin()
