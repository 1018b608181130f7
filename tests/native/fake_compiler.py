"""A C compiler that is as good or bad as a test wants it."""

from __future__ import annotations

from pathlib import Path


class FakeCompiler:
    """A shell script that has a version, and runs `body` with $output as the file to write and $arguments. It counts its runs."""

    def __init__(self, path: Path, body: str, version: str = "echo fake 1.0") -> None:
        self.path = path
        self._runs = path.with_suffix(".runs")
        path.write_text(
            f'#!/bin/sh\ncase "$*" in *--version) {version}; exit;; esac\necho run >> {self._runs}\n'
            f'arguments="$*"\nwhile [ "$1" != -o ]; do shift; done\noutput=$2\n{body}\n'
        )
        path.chmod(0o755)

    @property
    def num_runs(self) -> int:
        return len(self._runs.read_text().splitlines()) if self._runs.exists() else 0
