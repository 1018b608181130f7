"""`make gpu KIND=wheels`: fetches the wheels that a GPU machine without a network lacks.

python -m scripts.gpu.wheels FOLDER

Which ones follows from pyproject.toml and from what the installed packages require in turn, their versions from constraints.txt.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from .project import ROOT, requirements

PYTHON: Final = "3.12"
"""Version of the machine's Python."""
BROUGHT: Final = frozenset(
    map(canonicalize_name, ("torch", "transformers", "numpy", "tokenizers", "safetensors", "huggingface_hub", "PyYAML"))
)
"""Packages of the machine, with their requirements: they are large, and their versions belong together."""
_GLIBC: Final = range(17, 29)
"""2.17 to 2.28: pip matches platforms by exact name, and wheels for older ones run on newer machines."""


def pinned() -> dict[NormalizedName, str]:
    """Versions by name, from constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def needed(roots: Iterable[str]) -> set[NormalizedName]:
    """These requirements and theirs, without the machine's packages."""
    environment = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "extra": ""}
    found: set[NormalizedName] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        is_elsewhere = requirement.marker is not None and not requirement.marker.evaluate(environment)
        if is_elsewhere or name in found or name in BROUGHT:
            continue
        found.add(name)
        waiting += [Requirement(text) for text in metadata.requires(name) or ()]
    return found


def download(folder: Path) -> int:
    """Fetch them with pip, replacing the folder's content. Returns pip's exit status."""
    versions = pinned()
    wanted = sorted(f"{name}=={versions[name]}" for name in needed(requirements()))
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    for minor in _GLIBC:
        command += ["--platform", f"manylinux_2_{minor}_x86_64"]
    command += ["--platform", "manylinux2014_x86_64", "--quiet", "--disable-pip-version-check", *wanted]
    status = subprocess.run(command, check=False).returncode
    if status == 0:
        size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
        print(f"{len(wanted)} wheels for Python {PYTHON} in {folder}, {size / 1e6:.1f} MB")
    return status


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(str(__doc__))
    sys.exit(download(Path(sys.argv[1])))
