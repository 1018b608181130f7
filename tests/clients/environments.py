"""An environment for each client of OpenAI's API that is tested, because their pins contradict each other's and ours.

A client is a file `pins/NAME.txt`: its version, and those of all that it needs, which is the only place where versions are.
Its environment is `.venv-clients-NAME` in the checkout. It is made once and used again until the pins or the Python change.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PINS: Final = Path(__file__).with_name("pins")
ROOT: Final = Path(__file__).parents[2]
NAMES: Final = tuple(sorted(path.stem for path in PINS.glob("*.txt")))
_MADE_OF: Final = ".made-of"
"""In an environment: what it was made of, written when it was complete."""
_SHOWN_CHARACTERS: Final = 2000


class NoEnvironment(Exception):
    """An environment could not be made; the message has the command and what it printed."""


def folder_of(name: str) -> Path:
    """Where the environment of a client is."""
    return ROOT / f".venv-clients-{name}"


def program(name: str, command: str) -> Path:
    """A program of a client's environment. AssertionError if the environment is not there."""
    path = folder_of(name) / "bin" / command
    assert path.exists(), f"{path} is missing: make test SUITE=clients ONLY={name}"
    return path


def make(folder: Path, pins: Path) -> bool:
    """Make the environment `folder` from the requirements `pins`, or use what is there; returns whether it was made. Raises
    NoEnvironment."""
    made_of = f"{sys.version}\n{pins.read_text()}"
    mark = folder / _MADE_OF
    if mark.exists() and mark.read_text() == made_of:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    # This environment's pip fills it: one of its own takes four seconds to install.
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", "--requirement", str(pins)])
    mark.write_text(made_of)
    return True


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise NoEnvironment(
            f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-_SHOWN_CHARACTERS:]}"
        )
