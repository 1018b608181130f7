"""Runs scripts in processes that have not imported the hub's client yet, but all that it imports.

The client reads its settings from the environment when it is imported, so each case needs a process of its own. To start Python and
import the rest takes several times what a case does. A server imports the rest once and forks a process for each script.
`python -m tests.model.fresh_imports` is that server.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

CLIENT = "huggingface_hub"
_THE_REST = (
    *("asyncio", "concurrent.futures.thread", "filelock", "httpcore2", "httpx2", "structlog", "tqdm.auto"),
    *("tqdm.contrib.concurrent", "yaml", "kvpool.worker_service.model.source.files"),
)
"""What the client and what calls it import."""
_ROOT = Path(__file__).parents[2]


class FreshImports:
    """Starts the server with the first script. For one thread."""

    def __init__(self, folder: Path) -> None:
        """folder: for what scripts print."""
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            with self._process as process:
                assert process.stdin is not None
                process.stdin.close()  # then it ends

    def run(
        self, script: str, arguments: list[str], environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """As `python -c SCRIPT ARGUMENTS` in this environment."""
        process = self._process or self._begin()
        assert process.stdin is not None
        assert process.stdout is not None
        outputs = [self._folder / name for name in ("stdout", "stderr")]
        asked = _Asked(script, arguments, dict(environment), list(map(str, outputs)))
        print(json.dumps(asked), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        assert answer, f"the server ended with status {process.wait(10)}"
        return subprocess.CompletedProcess([script, *arguments], int(answer), *(path.read_text() for path in outputs))

    def _begin(self) -> subprocess.Popen[str]:
        path = os.pathsep.join(map(str, (_ROOT / "common", _ROOT)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": path},
        )
        return self._process


class _Asked(NamedTuple):
    """A script to be run."""

    script: str
    arguments: list[str]
    environment: dict[str, str]
    outputs: list[str]
    """Files for stdout and stderr."""


def _run(asked: _Asked) -> NoReturn:
    """In the child."""
    status = 1
    try:
        files = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) for path in asked.outputs]
        for target, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files]):
            os.dup2(file, target)
        os.environ.clear()
        os.environ.update(asked.environment)
        sys.argv = ["-c", *asked.arguments]
        exec(compile(asked.script, "<script>", "exec"), {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Each line of stdin is a script to be run; each line of stdout an exit status."""
    for name in _THE_REST:
        importlib.import_module(name)
    assert CLIENT not in sys.modules
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _run(_Asked(*json.loads(line)))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
