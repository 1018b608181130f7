"""Copies of the repository to run mutants in, made of hard links, and the environment in which only the copy is imported.

kvpool may be installed in editable mode, and would then be imported from the checkout wherever the copy does not come first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.mutants.patch import Mutant, mutated

ROOT = Path(__file__).parents[2]
PRODUCT = ("cache_service", "worker_service", "client", "cli", "load", "walkthrough", "gateway", "common")
"""Folders of what is shipped."""
NEEDED = (*PRODUCT, "protos", "scripts", "tests")
"""Folders that the tests of mutants need."""


def _link(source: str, target: str) -> None:
    """A hard link; a copy where file systems are different."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def copy(source: Path, target: Path) -> None:
    """What the tests need of a repository, compiled files included: they are good for the copies too."""
    target.mkdir(parents=True)
    half_written = shutil.ignore_patterns("*.pyc.*")
    for name in NEEDED:
        shutil.copytree(source / name, target / name, symlinks=True, copy_function=_link, ignore=half_written)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy2(source / name, target / name)


def mutate(mutant: Mutant, root: Path) -> None:
    """Make the mistake in a copy. Raises PatchError. C that does not compile gets no verdict: the tests of it are left out."""
    texts = mutated(mutant, root)
    for name, text in texts.items():
        path = root / name
        path.unlink()  # a hard link: what it is linked to must stay as it is
        path.write_text(text, encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
    if any(name.endswith((".c", ".h")) for name in texts):
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(build, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def environment(root: Path) -> dict[str, str]:
    folders = (root, root / "common")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
    }


def modules(paths: list[str]) -> list[str]:
    """The names under which files of Python are imported; those in C are compiled."""
    python = [path.removeprefix("common/kvpool/") for path in paths if path.endswith(".py")]
    return [f"kvpool.{path.removesuffix('.py').replace('/', '.')}" for path in python]


_IMPORT = """
import importlib, sys
for name in sys.argv[2:]:
    file = importlib.import_module(name).__file__
    if not file.startswith(sys.argv[1]):
        sys.exit(f"{name} is imported from {file}, not from the copy in {sys.argv[1]}")
"""


def import_command(root: Path, paths: list[str]) -> list[str]:
    """Imports these files, and fails unless they, the messages and what all processes share come from the copy."""
    names = [*modules(paths), "kvpool.v1.cache_pb2", "kvpool.process.settings", "tests.mutants.patch"]
    return [sys.executable, "-c", _IMPORT, str(root), *names]
