"""The forward pass stands back behind the rest of the worker."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from kvpool.worker_service.cpu_share import stand_back
from tests.cluster.in_process import in_process_cluster
from tests.tiny_models import make_tiny_model

Result = TypeVar("Result")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")


def _nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def _in_a_thread(work: Callable[[], Result]) -> Result:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def test_only_the_thread_that_asks_and_its_children_stand_back() -> None:
    def ask() -> tuple[int, int]:
        stand_back(7)
        stand_back(3)  # nobody comes forward again
        return _nice(), _in_a_thread(_nice)

    before = _nice()
    assert _in_a_thread(ask) == (max(7, before),) * 2
    assert _nice() == before


@pytest.mark.parametrize("model_nice", [0, 5])
async def test_a_workers_steps_stand_back_as_far_as_its_setting_says(tmp_path: Path, model_nice: int) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    async with in_process_cluster(model.path, tmp_path, model_nice=model_nice) as cluster:
        thread = cluster.worker.engine._model_thread
        assert thread.submit(_nice).result() == max(model_nice, _nice())
