"""For all tests: GPU tests are left out where there is no GPU, and the summary says so."""

from __future__ import annotations

import os
import signal

# Before anything imports torch: threads that spin while they wait make a busy machine crawl.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hypothesis import HealthCheck, settings

# A machine that is busy for a moment says nothing of the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what runs in its background; services would inherit it, and tests send them Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_num_left_out = pytest.StashKey[int]()


@pytest.fixture
def loop_of_grpcio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers have the serving loop of a grpcio that is not known, which a malformed path ends. To be named before the server."""
    from kvpool.process import serving_loop

    monkeypatch.setattr(serving_loop, "KNOWN_GRPCIO", ())


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is marked `gpu` on a machine without one."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu or _has_cuda():
        return
    config.stash[_num_left_out] = len(on_gpu)
    config.hook.pytest_deselected(items=on_gpu)
    items[:] = [item for item in items if item not in on_gpu]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out and why."""
    count = config.stash.get(_num_left_out, 0)
    if count:
        terminalreporter.write_line(f"{count} GPU tests were left out: torch finds no CUDA device here")
