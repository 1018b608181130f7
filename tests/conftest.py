"""For all tests: those that need a GPU, the native step, a C compiler or zig are left out where there is none. The summary has
their number, and the time of each part."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

# Before anything imports torch: threads that spin while they wait make a busy machine crawl.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from kvpool.process.imports import without_collections
from tests import left_out
from tests.cluster.fork_server import ForkServer
from tests.cluster.process import Process, computing, environment_with

# readline sets them, in a process of pytest-xdist too, and what is piped would have the width of its terminal.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # A machine that is busy for a moment says nothing of the code.
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")

_SETTINGS_OF_PLUGINS: Final = {
    "pytest_asyncio": ("asyncio_mode", "asyncio_default_fixture_loop_scope"),
    "pytest_timeout": ("timeout",),
}
"""The settings in pyproject.toml of plugins that a GPU machine may lack."""
_MARKS_GPU: Final = re.compile(r"\bmark\.gpu\b|\.marks\b")
"""What a file with tests for a GPU has in its text."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the settings of a plugin that is not installed, so that pytest starts without it."""
    for plugin, names in _SETTINGS_OF_PLUGINS.items():
        if importlib.util.find_spec(plugin) is None:
            for name in names:
                parser.addini(name, f"read by {plugin}, which is not installed")


def _has_gpu_tests(place: Path) -> bool:
    files = place.rglob("test_*.py") if place.is_dir() else [place]
    return any(_MARKS_GPU.search(file.read_text()) for file in files)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` imports no other tests and no conftest.py of theirs: a GPU machine may lack what they need."""
    return True if config.option.markexpr == "gpu" and not _has_gpu_tests(collection_path) else None


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what runs in its background; services would inherit it, and tests send them Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """Services of clusters are forked, which saves the imports of each. The server itself starts with the first of them."""
    Process.fork_server = ForkServer(environment_with(computing(num_threads=1)))
    yield
    Process.fork_server.stop()
    Process.fork_server = None


@pytest.fixture
def loop_of_grpcio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers have the serving loop of a grpcio that is not known, which a malformed path ends. To be named before the server."""
    from kvpool.process import serving_loop

    monkeypatch.setattr(serving_loop, "KNOWN_GRPCIO", ())


def _why_no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "torch finds no CUDA device here"


def _why_no_native_step() -> str | None:
    from kvpool.worker_service.native.cpu.selection import NoNativeStep, load_step

    try:
        load_step("float32", print), load_step("bfloat16", print)
    except NoNativeStep as error:
        return str(error)
    return None


def _why_no_compiler() -> str | None:
    from kvpool.worker_service.native.cpu.targets import find_compiler

    return "there is no C compiler" if find_compiler() is None else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What the tests import is left out of all garbage collections: torch and transformers are 600,000 objects."""
    with without_collections():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is marked `gpu`, `native`, `compiler` or `zig` on a machine without one."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    for file in {item.path for item in on_gpu}:
        if not _has_gpu_tests(file):
            raise pytest.UsageError(
                f"`-m gpu` does not find the tests in {file}: write pytest.mark.gpu or .marks there"
            )
    for mark, found_by, what in (
        ("gpu", _why_no_gpu, "GPU tests were left out"),
        ("native", _why_no_native_step, "tests of the native step were left out"),
        ("compiler", _why_no_compiler, "tests that compile were left out"),
        (
            "zig",
            lambda: None if importlib.util.find_spec("ziglang") else "there is no Python package ziglang",
            "tests of compiling for other CPUs were left out",
        ),
    ):
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and (why := found_by()):
            left_out.leave_out(config, items, marked, f"{what}: {why}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Tiny tensors only get slower by more threads, much slower beside the other processes of a cluster or of pytest-xdist. Before
    each test and its fixtures: a worker that was loaded in this process may have set another number."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The hook of pytest-xdist for a process that has ended; only the process that started it prints a summary."""
    left_out.take_over(node)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in left_out.lines(config):
        terminalreporter.write_line(line)
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[str(PurePosixPath(report.nodeid.partition("::")[0]).parent)] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("seconds of each part")
        for part, duration in sorted(seconds.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(f"{duration:7.1f} {part}")
