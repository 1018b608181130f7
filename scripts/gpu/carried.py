"""Installs wheels that were built on another machine, on a machine with its own Python and without a network.

Needs only the standard library and pip. kvpool itself is linked, not installed: building its wheel would need setuptools.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .project import package_folders


class NoWheels(Exception):
    """The wheels cannot be installed; the message says what to do."""


def install(wheels: Path, site: Path) -> None:
    """Install all wheels of the folder into `site`, link kvpool there, and put it first on the import path of this process and its
    children. Raises NoWheels."""
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise NoWheels(
            f"there are no wheels in {wheels}: run `make gpu KIND=wheels` on a machine with a network, and copy the folder"
        )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--target", str(site), *map(str, files)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise NoWheels(f"pip could not install the wheels of {wheels} with {sys.executable}:\n{done.stdout.strip()}")
    link_packages(site)
    sys.path.insert(0, str(site))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(site) + (os.pathsep + before if before else "")


def link_packages(site: Path) -> None:
    """kvpool.v1, kvpool.worker_service and so on, as links into the tree."""
    for package, folder in package_folders().items():
        link = site.joinpath(*package.split("."))
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder, target_is_directory=True)
