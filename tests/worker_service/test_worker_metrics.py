"""The worker's page and its line in the log, over a real engine and a real manager's core."""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import generate_latest
from structlog.testing import capture_logs

from kvpool.process.metrics import MetricsPage
from kvpool.v1 import worker_pb2
from kvpool.worker_service.engine.errors import ErrorKind
from kvpool.worker_service.metrics import OUTCOMES, WorkerMetrics
from kvpool.worker_service.throughput import ThroughputLog
from tests.scrape import Scrape
from tests.until import until
from tests.worker_service.world import World

MODEL = {"model_name": "tracer", "engine": "0"}
FACTS = worker_pb2.ModelFacts(model_name="tracer", dtype="float32", device="cpu")
KV_CACHE_BYTES = 65 * 512
VLLM_TYPES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prefix_cache_queries_total": "counter",
    "vllm:prefix_cache_hits_total": "counter",
    "vllm:num_preemptions_total": "counter",
    "vllm:prompt_tokens_total": "counter",
    "vllm:generation_tokens_total": "counter",
    "vllm:request_success_total": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:iteration_tokens_total": "histogram",
}


def look(world: World) -> Scrape:
    page = MetricsPage()
    WorkerMetrics(world.engine, world.link, FACTS, KV_CACHE_BYTES, lambda: 0).fill(page)
    return Scrape(generate_latest(page).decode())


def one_world(**settings: Any) -> World:
    return World(num_blocks=65, block_size=4, **settings)


async def test_every_name_of_vllm_is_there_from_the_start_and_of_its_type() -> None:
    """As they stand in the text: routers look for them by whole name."""
    async with one_world().running() as world:
        page = look(world)
    said = dict(line.split()[2:4] for line in page.text.splitlines() if line.startswith("# TYPE vllm:"))
    assert said == VLLM_TYPES
    for name, kind in VLLM_TYPES.items():
        sample = f"{name}_count" if kind == "histogram" else name
        series = [dict(labels) for found, labels in page.values if found == sample]
        assert series, name
        if name != "vllm:cache_config_info":
            assert all(MODEL.items() <= labels.items() for labels in series), name
    assert page.labelled("vllm:request_success_total", "finished_reason") == dict.fromkeys(
        ("stop", "length", "abort", "error"), 0
    )
    assert page.value(
        "vllm:cache_config_info",
        block_size="4",
        num_gpu_blocks="65",
        cache_dtype="float32",
        enable_prefix_caching="True",
        engine="0",
    )


KNOWN_OF_VLLM = {
    "prefix_cache_queries_total": 20,
    "prompt_tokens_total": 20,
    "prefix_cache_hits_total": 8,
    "generation_tokens_total": 10,
    "time_to_first_token_seconds_count": 2,
    "inter_token_latency_seconds_count": 8,
    "e2e_request_latency_seconds_count": 2,
}
KNOWN = {
    "prompt_tokens_total": 20,
    "cached_tokens_total": 8,
    "prefilled_tokens_total": 12,
    "generated_tokens_total": 10,
    "manager_calls_failed_total": 0,
    "sessions_total": 1,
    "session_open": 1,
    "kv_cache_bytes": KV_CACHE_BYTES,
}


async def test_the_page_tells_the_tokens_hits_and_ends_of_known_traffic() -> None:
    """Two prompts of ten tokens, equal and one after the other: the second finds two blocks of four."""
    async with one_world().running() as world:
        for _ in range(2):
            await world.answered(list(range(10)), 5)
        lost = world.submit([50, 51, 52], 100)
        world.engine.abort(lost)
        page, num_calls = look(world), world.cache.num_calls
    assert {name: page.value(f"vllm:{name}", **MODEL) for name in KNOWN_OF_VLLM} == KNOWN_OF_VLLM
    assert {name: page.value(f"kvpool_worker_{name}") for name in KNOWN} == KNOWN
    assert page.labelled("vllm:request_success_total", "finished_reason") == {
        "stop": 0, "length": 2, "abort": 1, "error": 0,
    }  # fmt: skip
    ended = page.labelled("kvpool_worker_requests_ended_total", "outcome")
    assert ended == {**dict.fromkeys(OUTCOMES, 0), "length": 2, "cancelled": 1}
    assert page.value("kvpool_worker_step_duration_seconds_count") == world.engine.stats.num_steps
    assert page.value("kvpool_worker_manager_calls_total") == num_calls > 0


async def test_gauges_tell_what_is_here_now() -> None:
    """While one of two requests runs, the other waits for its place in the batch."""
    async with one_world(max_num_seqs=1, max_num_waiting=3).running() as world:
        gate = world.model.gate = threading.Event()
        running, waiting = world.submit(list(range(9)), 30), world.submit([40, 41], 30)
        await until(lambda: world.engine.scheduler.num_running >= 1)
        page = look(world)
        assert page.labelled("kvpool_worker_requests", "state") == {"running": 1, "waiting": 1}
        assert page.value("kvpool_worker_waiting_limit") == 3
        assert page.value("vllm:num_requests_running", **MODEL) == page.value("vllm:num_requests_waiting", **MODEL) == 1
        assert page.value("kvpool_worker_held_blocks", group="0") == 3
        assert page.value("vllm:kv_cache_usage_perc", **MODEL) == 3 / 64
        gate.set()
        world.engine.abort(running)
        world.engine.abort(waiting)
    page = look(world)
    assert page.value("kvpool_worker_held_blocks", group="0") == page.value("vllm:kv_cache_usage_perc", **MODEL) == 0


async def test_an_unanswered_call_is_counted_as_failed() -> None:
    async with one_world().running() as world:
        world.wire.lose_next_reply = "Allocate"
        request = world.submit([1, 2, 3], 5)
        await until(lambda: world.link.num_failed_calls)
        world.wire.is_cut = False
        await until(lambda: request.stream.is_finished)
        assert look(world).value("kvpool_worker_manager_calls_failed_total") == world.link.num_failed_calls


async def test_what_requests_say_never_becomes_a_label() -> None:
    async with one_world().running() as world:
        before = look(world).values.keys()
        for index in range(8):
            await world.answered([index], 3, sequence_id=f"id-{index}", tenant_salt=f"tenant-{index}")
        for kind in ErrorKind:
            world.engine.stats.refused[kind] += 1
        assert look(world).values.keys() == before


def logged(line: ThroughputLog) -> list[Any]:
    """What one look writes to the log."""
    with capture_logs() as lines:
        line.log_change()
    return list(lines)


async def test_the_line_has_rates_since_the_look_before_and_nothing_when_idle() -> None:
    """Twelve prompt tokens computed of twenty, ten generated, in ten seconds."""
    now = 100.0
    async with one_world().running() as world:
        line = ThroughputLog(world.engine, clock=lambda: now)
        assert logged(line) == []
        for _ in range(2):
            await world.answered(list(range(10)), 5)
        await world.until_idle()
        now += 10.0
        assert logged(line) == [
            {
                "log_level": "info",
                "event": "throughput",
                "prompt_tokens_per_s": 1.2,
                "generated_tokens_per_s": 1.0,
                "running": 0,
                "waiting": 0,
                "kv_usage": 0.0,
                "hit_rate": 0.4,
            }
        ]
        now += 10.0
        assert logged(line) == []


async def test_there_is_a_line_while_requests_run_though_nothing_moves() -> None:
    """A worker that is stuck is just the one that an operator looks at."""
    now = 100.0
    async with one_world().running() as world:
        gate = world.model.gate = threading.Event()
        request = world.submit([1, 2, 3], 30)
        await until(lambda: world.engine.scheduler.num_running)
        line = ThroughputLog(world.engine, clock=lambda: now)
        now += 10.0
        (told,) = logged(line)
        gate.set()
        world.engine.abort(request)
    assert (told["running"], told["generated_tokens_per_s"]) == (1, 0.0)
    assert "hit_rate" not in told  # no prompt came in meanwhile
