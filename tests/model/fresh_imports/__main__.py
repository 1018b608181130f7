"""Runs a script in a process that has not imported the hub's client yet, but all that it imports.

The client reads its settings from the environment when it is imported. Arguments: the script, the environment as JSON, a file for
stderr, the script's arguments. A fork server runs this module, so that each script does not import the rest again.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Final

_THE_REST: Final = (
    *("asyncio", "concurrent.futures.thread", "filelock", "httpcore2", "httpx2", "structlog", "tqdm.auto"),
    *("tqdm.contrib.concurrent", "yaml", "kvpool.worker_service.model.source.files"),
)
"""What the client and what calls it import."""
for _name in _THE_REST:
    importlib.import_module(_name)
assert "huggingface_hub" not in sys.modules


def main() -> int:
    """Run the script as `python -c SCRIPT ARGUMENT…` in this environment; what it raises is printed as there."""
    script, environment, errors, *arguments = sys.argv[1:]
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
    os.environ.clear()
    os.environ.update(json.loads(environment))
    sys.argv = ["-c", *arguments]
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
