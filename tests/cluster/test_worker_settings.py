"""What a worker is told comes to the parts that decide, and what it says of itself in its log and in /metrics has no secret."""

from __future__ import annotations

import socket
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

from kvpool.client.errors import InvalidRequest
from kvpool.process.address import PortError
from kvpool.worker_service import throughput
from kvpool.worker_service.cache.settings import CacheSettings
from kvpool.worker_service.engine.policy import SchedulingPolicy
from kvpool.worker_service.engine.settings import EngineSettings
from kvpool.worker_service.server import WorkerServer
from kvpool.worker_service.settings import WorkerSettings
from tests import http2
from tests.cluster.in_process import in_process_cluster
from tests.scrape import num_listening_sockets, scrape
from tests.tiny_models import TinyModel, make_tiny_model
from tests.until import until

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
    with capture_logs() as logged:
        async with in_process_cluster(model.path, tmp_path) as cluster:
            await cluster.complete([1, 2, 3], max_tokens=2)
            registration = cluster.worker._link._registration
            keys = [registration.session_key, registration.introduction.process_key]
    assert any(line["event"] == "registered" for line in logged)
    assert all(len(key) >= 16 for key in keys)
    told = str(logged)
    assert not [key for key in keys if key.hex() in told or str(key)[2:-1] in told]


async def test_a_worker_tells_of_itself_and_a_refused_request_is_one(
    model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it counts is compared in tests/worker_service/test_worker_metrics.py."""
    monkeypatch.setattr(throughput, "INTERVAL_SECONDS", 0.02)
    with capture_logs() as said:
        async with in_process_cluster(model.path, tmp_path, metrics_port=0, num_blocks=20) as cluster:
            assert cluster.worker.metrics is not None
            await cluster.complete([1, 2, 3], max_tokens=5)
            with pytest.raises(InvalidRequest):
                await cluster.complete([1, 2, 3], max_tokens=100)
            await cluster.until_idle()
            page = await scrape(cluster.worker.metrics.url)
            await until(lambda: any(line.get("generated_tokens_per_s", 0) > 0 for line in said))
    labels = {"model_name": cluster.worker.facts.model_name, "engine": "0"}
    assert page.value("vllm:prompt_tokens_total", **labels) == 3
    assert page.value("vllm:generation_tokens_total", **labels) == 5
    assert page.value("kvpool_worker_requests_ended_total", outcome="length") == 1
    refused = page.labelled("kvpool_worker_requests_refused_total", "reason")
    assert {reason: count for reason, count in refused.items() if count} == {"never_fits": 1}
    assert page.value("process_resident_memory_bytes") > 1 << 20


async def test_a_server_that_was_built_anew_is_counted(loop_of_grpcio: None, model: TinyModel, tmp_path: Path) -> None:
    name = "kvpool_worker_server_rebuilds_total"
    async with in_process_cluster(model.path, tmp_path, metrics_port=0) as cluster:
        assert cluster.worker.metrics is not None
        assert (await scrape(cluster.worker.metrics.url)).value(name) == 0
        async with await http2.Connection.open(cluster.worker.port) as connection:
            await connection.request(b"/\xff")
            await until(lambda: cluster.worker._grpc.num_rebuilds)
        assert (await scrape(cluster.worker.metrics.url)).value(name) == cluster.worker._grpc.num_rebuilds == 1


async def test_a_worker_listens_for_metrics_only_if_it_is_told_to(model: TinyModel, tmp_path: Path) -> None:
    before = num_listening_sockets()
    async with in_process_cluster(model.path, tmp_path) as cluster:
        assert cluster.worker.metrics is None
        assert num_listening_sockets() - before == 2  # a manager's, and a worker's


async def test_a_worker_says_it_before_it_loads_when_the_metrics_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given: dict[str, Any] = {"model": str(tmp_path / "none"), "metrics_port": port}
        settings = WorkerSettings(**given)
        with pytest.raises(PortError, match=rf"127\.0\.0\.1:{port}: .*--metrics-port"):
            await WorkerServer.load(settings)
