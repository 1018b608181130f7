"""Python programs in processes of their own, which import kvpool and the tests from this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENT…` to its end, whatever that is. It has PATH, and these variables."""
    path = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "common"))
    return subprocess.run(
        [sys.executable, *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
