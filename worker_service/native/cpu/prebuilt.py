"""Prebuilt steps: compiled when kvpool was packaged, one per kind of CPU and number type. An image or a wheel may carry them."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from . import cpu_info
from .compiler import NoNativeLibrary, NumberType, one_line, source_digest
from .library import Library, LibraryMismatch, open_library
from .trial import why_it_does_not_run

FOLDER = Path(__file__).parent / "builds"
"""Who can write here can write the modules next to it too, so owners and modes are not looked at."""
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Build:
    """One file."""

    file: str
    """Its name in the folder of the manifest."""
    sha256: str
    number_type: NumberType
    target: str
    """Shown to users: `x86-64-v4`."""
    machine: str
    """As platform.machine() names it."""
    cpu_flags: tuple[str, ...]
    """Instructions that it uses, as cpu_info.flags() names them."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """All files of a folder."""

    source: str
    """The source_digest() of what they were compiled from."""
    compiler: str
    builds: tuple[Build, ...]
    """The fastest first."""


class NoPrebuiltStep(NoNativeLibrary):
    """Of the prebuilt steps none can be used."""


class _DamagedFile(NoPrebuiltStep):
    """A file is missing or is another than its manifest says."""


class NothingPrebuilt(NoPrebuiltStep):
    """This installation has none, as after `pip install` from a checkout."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it last: files without it count for nothing."""
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Raises NothingPrebuilt if there is no folder, NoPrebuiltStep if there is no manifest in it."""
    if not folder.exists():
        raise NothingPrebuilt("This installation has no prebuilt step.")
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        builds = [Build(**{**build, "cpu_flags": tuple(build["cpu_flags"])}) for build in content["builds"]]
        return Manifest(content["source"], content["compiler"], tuple(builds))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoPrebuiltStep(
            f"{folder / MANIFEST} cannot be read: {one_line(repr(error))}. Install kvpool again."
        ) from error


def prebuilt_library(number_type: NumberType, progress: Callable[[str], None]) -> Library:
    """The fastest prebuilt step that runs here, tried in another process; progress gets a line if faster ones failed.

    Raises NoPrebuiltStep.
    """
    manifest = read_manifest(FOLDER)
    if manifest.source != source_digest():
        raise NoPrebuiltStep(
            f"The steps in {FOLDER} were built from another source. Install kvpool again, or remove them."
        )
    problems, is_damaged = [], False
    for build in _for_this_cpu(manifest, number_type):
        try:
            library = _load(build)
        except NoPrebuiltStep as error:
            problems.append(str(error))
            is_damaged |= isinstance(error, _DamagedFile)
            continue
        if problems:
            progress(_message(problems, is_damaged))
        return library
    raise NoPrebuiltStep(_message(problems, is_damaged))


def _message(problems: Sequence[str], is_damaged: bool) -> str:
    change = " Install kvpool again." if is_damaged else ""
    return f"Prebuilt steps in {FOLDER} cannot be used: {'; '.join(problems)}.{change}"


def _for_this_cpu(manifest: Manifest, number_type: NumberType) -> list[Build]:
    """Raises NoPrebuiltStep."""
    machine, flags = platform.machine(), cpu_info.flags()
    here = [build for build in manifest.builds if (build.number_type, build.machine) == (number_type, machine)]
    if not here:
        raise NoPrebuiltStep(f"There is no prebuilt {number_type} step for {machine}.")
    if fitting := [build for build in here if flags.issuperset(build.cpu_flags)]:
        return fitting
    lacking = sorted(set(here[-1].cpu_flags) - flags)
    raise NoPrebuiltStep(f"The prebuilt steps need a CPU with {', '.join(lacking)}, which this one lacks.")


def _load(build: Build) -> Library:
    """Raises NoPrebuiltStep with the file's name and what is wrong with it."""
    path = FOLDER / build.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _DamagedFile(f"{build.file} cannot be read ({error.strerror})") from error
    if hashlib.sha256(content).hexdigest() != build.sha256:
        raise _DamagedFile(f"{build.file} is not the file that {MANIFEST} describes")
    try:
        if (problem := why_it_does_not_run(path)) is None:
            return replace(open_library(path), origin=f"prebuilt for {build.target}")
    except (OSError, LibraryMismatch) as error:
        problem = one_line(str(error))
    raise NoPrebuiltStep(f"{build.file} does not run here ({problem})")
