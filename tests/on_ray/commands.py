"""`kvpool ray …` for each line on stdin, all in one process: to import Ray takes longer than what most commands do.

A line is a JSON object: the `arguments`, and `variables` that are set meanwhile. The answer is one in a line on stdout: the exit
`status`, and what was written to `stdout` and `stderr`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from unittest import mock

import kvpool.cli.on_ray.before_ray  # noqa: F401

# isort: split
import ray

from tests.client.commands import exit_status


def run(arguments: Sequence[str], variables: Mapping[str, str]) -> dict[str, object]:
    """One command; afterwards this process is not connected to Ray, as if the command's own had ended."""
    with (
        mock.patch.dict(os.environ, variables),
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        try:
            status = exit_status(["ray", *arguments])
        finally:
            ray.shutdown()
    return {"status": status, "stdout": stdout.getvalue(), "stderr": stderr.getvalue()}


def serve() -> None:
    """Until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints
    for line in sys.stdin:
        answers.write(json.dumps(run(**json.loads(line))) + "\n")


if __name__ == "__main__":
    serve()
