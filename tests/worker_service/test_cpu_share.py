"""The forward pass runs at a lower priority than the rest of the worker."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from kvpool.worker_service.model.device import lower_priority
from tests.cluster.in_process import in_process_cluster
from tests.tiny_models import make_tiny_model

Result = TypeVar("Result")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")


def _nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def _in_a_thread(work: Callable[[], Result]) -> Result:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def test_only_the_calling_thread_and_its_children_get_a_lower_priority() -> None:
    def ask() -> tuple[int, int]:
        lower_priority(7)
        lower_priority(3)  # never raises it again
        return _nice(), _in_a_thread(_nice)

    before = _nice()
    assert _in_a_thread(ask) == (max(7, before),) * 2
    assert _nice() == before


async def test_a_workers_steps_run_at_the_nice_value_of_its_setting(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    async with in_process_cluster(model.path, tmp_path, model_nice=7) as cluster:
        thread = cluster.worker.engine._model_thread
        assert thread.submit(_nice).result() == max(7, _nice())
