"""Workers share cores without spinning on them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
import kvpool.worker_service.model
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


def spin_count(model: Path) -> str:
    """What the OpenMP of a worker's process reports when it was loaded. The process ends at the device, after torch's import."""
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvpool.worker_service",
            "--dry-run",
            "--model",
            str(model),
            "--device",
            "cuda:99",
        ],
        env={
            **{k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")},
            "OMP_DISPLAY_ENV": "VERBOSE",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    (told,) = set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", result.stderr))
    return str(told)


@pytest.mark.skipif(sys.platform != "linux", reason="torch has GNU's OpenMP on Linux only")
def test_the_threads_of_torch_do_not_spin(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert spin_count(tmp_path) == "0"
