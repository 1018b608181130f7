"""`kvpool ray status --json` for each line on stdin, all in one process: to import Ray takes much longer than to look.

What the command prints comes as one line on stdout.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys

from kvpool.client.cli.app import main


def serve() -> None:
    """Until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints
    for _ in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            main(["ray", "status", "--json"])
        answers.write(json.dumps(json.loads(printed.getvalue())) + "\n")


if __name__ == "__main__":
    serve()
