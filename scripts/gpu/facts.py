"""The part facts: the machine, its packages, and the speed of the device."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from .cases import AddRow, Case, attempt
from .project import requirements
from .results import Outcome, Row
from .setup import Setup

_SHOWN = ("torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "tokenizers", "safetensors", "pytest")
_COMPILERS = ("cc", "nvcc", "ncu", "compute-sanitizer")


def cases(setup: Setup) -> Sequence[Case]:
    return [Case("facts", _facts)]


def _facts(setup: Setup, add_row: AddRow) -> None:
    attempt(add_row, "packages", _packages)
    attempt(add_row, "device", lambda: Row("device", figures=device_figures(setup)))
    attempt(add_row, "speeds", lambda: _speeds(setup))


def versions() -> dict[str, str]:
    """Versions of Python and the main packages."""
    found = {"python": platform.python_version()}
    for package in _SHOWN:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _packages() -> Row:
    """Whether the installed packages satisfy pyproject.toml."""
    unmet = []
    for text in requirements():
        requirement = Requirement(text)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = "nothing"
        if version == "nothing" or not requirement.specifier.contains(version, prereleases=True):
            unmet.append(f"needs {requirement.name}{requirement.specifier}, there is {version}")
    tools = {f"has {tool}": shutil.which(tool) is not None for tool in _COMPILERS}
    return Row("packages", Outcome.FAILED if unmet else Outcome.PASSED, "\n".join(unmet), {**versions(), **tools})


def device_figures(setup: Setup) -> dict[str, Any]:
    """Name, size and driver of the device. Raises RuntimeError if torch does not find it."""
    import torch

    if not setup.is_cuda:
        return {"name": platform.processor() or platform.machine(), "cores": os.cpu_count(), "device": setup.device}
    properties = torch.cuda.get_device_properties(setup.device)
    return {
        "name": properties.name,
        "device": setup.device,
        "memory_gb": properties.total_memory / 1e9,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": str(torch.version.cuda),
        "driver": _driver(),
        "cores": os.cpu_count(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "not known"
    return done.stdout.strip().partition("\n")[0] or "not known"


def _speeds(setup: Setup) -> Row:
    import torch

    from .speeds import measure_speeds

    speeds = measure_speeds(torch.device(setup.device), setup.is_tiny)
    return Row(
        "speeds",
        figures={"copy_gb_per_s": speeds.copy_bytes_per_s / 1e9, "bf16_tflop_per_s": speeds.products_flop_per_s / 1e12},
    )


def probe(setup: Setup, add_row: AddRow) -> None:
    """One row: the machine, for the head of every file; or a failure if the device is missing."""
    import torch

    if setup.is_cuda and not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        add_row(Row("device", Outcome.FAILED, f"torch {torch.__version__} {built}, and sees no CUDA device"))
        return
    add_row(Row("device", figures={**device_figures(setup), "versions": versions()}))
