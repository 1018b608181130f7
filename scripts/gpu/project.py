"""Packages of kvpool and their requirements, from pyproject.toml. Needs only the standard library."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
TEST_TOOLS: Final = frozenset({"hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pyyaml"})
"""Packages of the extra dev that tests import; the others are linters and generators."""


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements() -> Sequence[str]:
    """Requirements of a worker and the tests, from pyproject.toml."""
    project = _project()["project"]
    extras = project["optional-dependencies"]
    tools = [text for text in extras["dev"] if _name(text) in TEST_TOOLS]
    return [*project["dependencies"], *extras["worker"], *tools]


def package_folders() -> dict[str, Path]:
    """kvpool.v1 → protos/kvpool/v1 and so on."""
    folders = _project()["tool"]["setuptools"]["package-dir"]
    return {package: ROOT / folder for package, folder in folders.items()}


def _name(requirement: str) -> str:
    return requirement.partition(">")[0].partition("=")[0].partition("<")[0].strip().lower()
