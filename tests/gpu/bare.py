"""A plugin of pytest that hides every package but pytest and what a worker needs, as on a GPU machine of somebody else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.gpu.project import worker_requirements


def _with_their_requirements(roots: Iterable[str]) -> set[str]:
    names: set[str] = set()
    waiting = list(roots)
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name not in names and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            names.add(name)
            waiting += metadata.requires(name) or ()
    return names


def _hide() -> None:
    shown = _with_their_requirements([*worker_requirements(), "pytest"])
    hidden = {
        module
        for module, packages in metadata.packages_distributions().items()
        if not shown.intersection(map(canonicalize_name, packages)) and "kvpool" not in packages
    }
    find_spec = PathFinder.find_spec

    def find_shown(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in hidden else find_spec(name, path, target)

    PathFinder.find_spec = find_shown  # type: ignore[method-assign, assignment]


_hide()
