"""Packages of kvpool and their requirements, from pyproject.toml. Needs only the standard library."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
TEST_TOOLS: Final = frozenset({"pytest", "pytest-timeout"})
"""Packages of the extra dev that run the tests of a GPU, which import nothing more than a worker does."""


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements() -> Sequence[str]:
    """Requirements of a worker and of the tests of a GPU, from pyproject.toml."""
    tools = _project()["project"]["optional-dependencies"]["dev"]
    return [*worker_requirements(), *(text for text in tools if _name(text) in TEST_TOOLS)]


def worker_requirements() -> Sequence[str]:
    """Requirements of a worker, from pyproject.toml."""
    project = _project()["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["worker"]]


def package_folders() -> dict[str, Path]:
    """kvpool.v1 → protos/kvpool/v1 and so on."""
    folders = _project()["tool"]["setuptools"]["package-dir"]
    return {package: ROOT / folder for package, folder in folders.items()}


def _name(requirement: str) -> str:
    return requirement.partition(">")[0].partition("=")[0].partition("<")[0].strip().lower()
