"""What a worker is told comes to the parts that decide, and what is secret to nobody else."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest
import structlog

from kvpool.worker_service.cache.settings import CacheSettings
from kvpool.worker_service.engine.policy import SchedulingPolicy
from kvpool.worker_service.engine.settings import EngineSettings
from kvpool.worker_service.settings import WorkerSettings
from tests.cluster.in_process import in_process_cluster
from tests.tiny_models import TinyModel, make_tiny_model

SETTINGS: Final[dict[str, Any]] = {
    "block_size": 8,
    "max_num_seqs": 7,
    "max_num_batched_tokens": 91,
    "max_mixed_prefill_tokens": 37,
    "scheduling_policy": SchedulingPolicy.priority,
    "max_num_waiting": 5,
    "max_num_waiting_tokens": 4321,
    "prefix_caching": False,
    "retention_interval": 64,
    "report_seconds": 0.03,
    "reserve_seconds": 0.7,
}
"""None is the default."""
OTHERWISE: Final = {"num_blocks", "max_model_len"}
"""Of the same name, and the result of a plan."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model("gemma2", tmp_path_factory.mktemp("gemma2"))


async def test_every_setting_reaches_the_engine_and_the_cache(model: TinyModel, tmp_path: Path) -> None:
    async with in_process_cluster(model.path, tmp_path, **SETTINGS, reader_seconds=3.5) as cluster:
        engine = cluster.worker.engine
        for settings in (engine.settings, engine.cache.settings):
            named = {field.name for field in fields(settings)} & WorkerSettings.model_fields.keys() - OTHERWISE
            assert named <= SETTINGS.keys()
            assert {name: getattr(settings, name) for name in named} == {name: SETTINGS[name] for name in named}
        assert cluster.worker._servicer._reader_seconds == 3.5
    for name, value in SETTINGS.items():
        assert value != WorkerSettings.model_fields[name].default
    assert {field.name for kind in (EngineSettings, CacheSettings) for field in fields(kind)} >= SETTINGS.keys()


def test_every_setting_of_the_model_reaches_what_loads_it(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "model": "somewhere", "dtype": "bfloat16", "device": "cpu", "max_model_len": 77, "max_encoder_tokens": 66,
        "cache_dir": tmp_path, "runtime": "native", "quantize": "int8", "block_size": 8, "max_num_batched_tokens": 91,
        "max_num_seqs": 7,
    }  # fmt: skip
    found = WorkerSettings(**given).model_settings()
    named = {field.name for field in fields(found)} & WorkerSettings.model_fields.keys()
    assert {name: getattr(found, name) for name in named} == given
    assert all(WorkerSettings.model_fields[name].default != value for name, value in given.items())


async def test_no_key_is_logged(model: TinyModel, tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logged:
        async with in_process_cluster(model.path, tmp_path) as cluster:
            await cluster.complete([1, 2, 3], max_tokens=2)
            registration = cluster.worker._link._registration
            keys = [registration.session_key, registration.introduction.process_key]
    assert any(line["event"] == "registered" for line in logged)
    assert all(len(key) >= 16 for key in keys)
    told = str(logged)
    assert not [key for key in keys if key.hex() in told or str(key)[2:-1] in told]
