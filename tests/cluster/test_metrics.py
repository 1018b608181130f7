"""/metrics of a real worker over HTTP, beside a real manager, and its line in the log."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.errors import InvalidRequest
from kvpool.process.address import PortError
from kvpool.worker_service import throughput
from kvpool.worker_service.server import WorkerServer
from kvpool.worker_service.settings import WorkerSettings
from tests import http2
from tests.cluster.in_process import in_process_cluster
from tests.cluster.polling import eventually
from tests.scrape import num_listening_sockets, scrape
from tests.tiny_models import TinyModel, make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model("llama", tmp_path_factory.mktemp("metrics"))


async def test_a_worker_tells_what_its_clients_have_seen(
    model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, hits and ends as in the usage that the answers tell; a refused request is one, and no more."""
    said: list[dict[str, Any]] = []

    class Line:
        def info(self, event: str, **values: Any) -> None:
            said.append({"event": event, **values})

    monkeypatch.setattr(throughput, "log", Line())
    monkeypatch.setattr(throughput, "INTERVAL_SECONDS", 0.02)
    async with in_process_cluster(model.path, tmp_path, metrics_port=0, num_blocks=20) as cluster:
        assert cluster.worker.metrics is not None
        prompt = list(range(1, 14))
        began_at = time.monotonic()
        answers = [await cluster.complete(prompt, max_tokens=5) for _ in range(3)]
        seconds_seen = time.monotonic() - began_at
        with pytest.raises(InvalidRequest):
            await cluster.complete(prompt, max_tokens=100)
        await cluster.until_idle()
        page = await scrape(cluster.worker.metrics.url)

        async def has_spoken() -> bool:
            return any(line["generated_tokens_per_s"] > 0 for line in said)

        await eventually(has_spoken, "the log has a line of throughput")
    labels = {"model_name": cluster.worker.facts.name, "engine": "0"}
    assert page.value("vllm:prompt_tokens_total", **labels) == sum(answer.num_prompt_tokens for answer in answers) == 39
    assert page.value("vllm:generation_tokens_total", **labels) == sum(len(answer.token_ids) for answer in answers)
    assert (
        page.value("vllm:prefix_cache_hits_total", **labels)
        == sum(answer.num_cached_tokens for answer in answers)
        == 24
    )
    assert page.value("kvpool_worker_requests_ended_total", outcome="length") == 3
    refused = page.labelled("kvpool_worker_requests_refused_total", "reason")
    assert {reason: count for reason, count in refused.items() if count} == {"never_fits": 1}
    assert page.labelled("vllm:request_success_total", "finished_reason")["error"] == 0
    assert page.value("vllm:time_to_first_token_seconds_sum", **labels) > 0
    assert page.value("vllm:time_to_first_token_seconds_count", **labels) == 3
    seconds = page.value("vllm:e2e_request_latency_seconds_sum", **labels)
    assert 0 < seconds <= seconds_seen  # one after the other
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    assert seconds == pytest.approx(sum(page.value(f"vllm:{part}_seconds_sum", **labels) for part in parts))
    assert page.value("kvpool_worker_session_open") == 1
    assert page.value("process_resident_memory_bytes") > 1 << 20


async def test_a_server_that_was_built_anew_is_counted(loop_of_grpcio: None, model: TinyModel, tmp_path: Path) -> None:
    name = "kvpool_worker_server_rebuilds_total"
    async with in_process_cluster(model.path, tmp_path, metrics_port=0) as cluster:
        assert cluster.worker.metrics is not None
        assert (await scrape(cluster.worker.metrics.url)).value(name) == 0
        async with await http2.Connection.open(cluster.worker.port) as connection:
            await connection.request(b"/\xff")

            async def rebuilt() -> bool:
                return cluster.worker._grpc.num_rebuilds > 0

            await eventually(rebuilt, "the gRPC server is built anew")
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
        with pytest.raises(PortError, match=rf"127\.0\.0\.1:{port} for metrics: .*--metrics-port"):
            await WorkerServer.load(settings)
