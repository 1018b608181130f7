"""What pyproject.toml says: the packages of kvpool and what they need. Needs nothing but the standard library."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
TEST_TOOLS: Final = frozenset({"hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pyyaml"})
"""Of the extra dev, what the tests import; the rest of it are linters and generators."""


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements() -> Sequence[str]:
    """What a worker and the tests need, as pyproject.toml has it."""
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
