"""Workers share cores without spinning on them."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import os, sys
import worker_service.model
print(os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules)
"""


def policy(**environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**{k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


def test_threads_wait_passively_unless_told_otherwise() -> None:
    """Set before torch is imported: OpenMP reads it when its library is loaded."""
    assert policy() == "PASSIVE False"
    assert policy(OMP_WAIT_POLICY="ACTIVE") == "ACTIVE False"
