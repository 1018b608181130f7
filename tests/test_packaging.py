"""What a user installs: only `kvpool/` lands in site-packages, with its types, and the base of it runs without torch."""

from __future__ import annotations

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.worker_service.native.cpu.targets import TARGETS

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
SOURCES = ("cache_service", "cli", "client", "common", "gateway", "load", "protos", "walkthrough", "worker_service")
PACKAGES = {
    "kvpool/v1": "protos/kvpool/v1",
    "kvpool/process": "common/kvpool/process",
    "kvpool/command": "common/kvpool/command",
    "kvpool/protocol": "common/kvpool/protocol",
    "kvpool/cache_service": "cache_service",
    "kvpool/worker_service": "worker_service",
    "kvpool/client": "client",
    "kvpool/gateway": "gateway",
}
BUILDS = "kvpool/worker_service/native/cpu/builds/"
# Nothing of these may be needed before a model is loaded.
TENSOR_SIDE = ("accelerate", "gguf", "huggingface_hub", "safetensors", "torch", "transformers")
FORBID = f"""
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {TENSOR_SIDE!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Forbidden())
"""


def run(*command: str | Path, cwd: Path | None = None, variables: dict[str, str] | None = None, status: int = 0) -> str:
    """Run a command to this end; returns what it printed."""
    done = subprocess.run(
        command, cwd=cwd, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def run_without_torch(site_packages: Path, program: str, status: int = 0) -> str:
    """What a program prints that has nothing but what the wheel installs, where importing the tensor side fails."""
    script = f"{FORBID}\nsys.path.insert(0, {str(site_packages)!r})\n{program}"
    return run(sys.executable, "-c", script, cwd=site_packages, status=status)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that the checkout stays clean and leftovers in it do not get in; the native step by a
    compiler that writes empty files."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "builds")
    for name in SOURCES:
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=ignored)
    for file in REPOSITORY.iterdir():
        if file.is_file():
            shutil.copy(file, source)
    (source / "worker_service/native/cpu/builds").mkdir()
    (source / "worker_service/native/cpu/builds/old.so").touch()
    compiler = target / "cc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)
    variables = {**os.environ, "CC": str(compiler), "KVPOOL_NATIVE": "required"}
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", target, source)
    log = run(*build, variables=variables)
    assert "is absent from the `packages` configuration" not in log, "it takes folders of data for packages"
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Iterator[email.message.Message]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        yield email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def site_packages(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but what the wheel installs."""
    target = tmp_path_factory.mktemp("site-packages")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, "--no-deps", "--no-index", "--no-compile", "--target", target, wheel)
    return target


def test_only_kvpool_lands_in_site_packages(names: set[str]) -> None:
    """No top-level `client`, `protos` or `tests`: those would collide with everybody's."""
    roots = {name.partition("/")[0] for name in names}
    assert {re.sub(r"-[\d.]+\.dist-info$", ".dist-info", root) for root in roots} == {"kvpool", "kvpool.dist-info"}


def test_every_module_of_the_checkout_is_in_the_wheel(names: set[str]) -> None:
    """A package that is not listed in pyproject.toml would be missing only for users."""
    for package, folder in PACKAGES.items():
        root = REPOSITORY / folder
        files = {
            f"{package}/{path.relative_to(root).as_posix()}"
            for pattern in ("*.py", "*.pyi", "*.proto", "py.typed")
            for path in root.rglob(pattern)
        }
        assert files <= names, sorted(files - names)
        assert f"{package}/py.typed" in files
    assert not [name for name in names if "__pycache__" in name or "test" in name]


def test_the_native_step_is_in_the_wheel(wheel: Path, names: set[str]) -> None:
    """All builds for this kind of machine and no source; for every version of Python, since only ctypes opens them."""
    machine = platform.machine()
    wanted = {one.file_name(kind) for one in TARGETS if one.machine == machine for kind in one.number_types}
    assert {name.removeprefix(BUILDS) for name in names if name.startswith(BUILDS)} == wanted
    assert not [name for name in names if name.endswith((".c", ".h"))]
    assert wheel.name.endswith(f"-py3-none-linux_{machine}.whl")


def test_the_base_install_requires_no_torch(metadata: email.message.Message) -> None:
    requirements = [str(requirement).replace('"', "'") for requirement in metadata.get_all("Requires-Dist", [])]
    base = {name_of(requirement) for requirement in requirements if "extra ==" not in requirement}
    worker = {name_of(requirement) for requirement in requirements if "extra == 'worker'" in requirement}
    assert "grpcio" in base
    assert base.isdisjoint(TENSOR_SIDE)
    assert worker == set(TENSOR_SIDE)


def name_of(requirement: str) -> str:
    """grpcio>=1.80 → grpcio"""
    return re.split(r"[^\w-]", requirement)[0]


def test_the_base_imports_without_torch(site_packages: Path) -> None:
    modules = (
        "kvpool.v1.worker_pb2_grpc",
        "kvpool.worker_service.settings",
        "kvpool.worker_service.cache.engine_cache",
        "kvpool.client",
        "kvpool.cli",
        "kvpool.cache_service.server",
    )
    program = f"import importlib\nfor module in {modules!r}: print(importlib.import_module(module).__file__)"
    places = run_without_torch(site_packages, program).splitlines()
    assert len(places) == len(modules)
    assert all(place.startswith(str(site_packages)) for place in places)


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_a_worker_without_the_tensor_side_says_what_to_install(site_packages: Path, arguments: list[str]) -> None:
    program = f"import runpy\nsys.argv = ['worker', *{arguments!r}]\n"
    program += "runpy.run_module('kvpool.worker_service', run_name='__main__')"
    printed = run_without_torch(site_packages, program, status=1)
    assert "pip install '.[worker]'" in printed
    assert "Traceback" not in printed


def test_the_command_is_installed_and_knows_its_subcommands(site_packages: Path) -> None:
    (entry_points,) = site_packages.glob("kvpool-*.dist-info/entry_points.txt")
    assert "kvpool = kvpool.command:main" in entry_points.read_text()
    program = "sys.argv = ['kvpool', '--help']\nfrom kvpool.command import main\nmain()"
    printed = run_without_torch(site_packages, program)
    for command in ("manager", "worker", "up", "generate", "chat", "status", "top", "blocks", "check"):
        assert command in printed
