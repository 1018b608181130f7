"""Metrics for routers and dashboards made for vLLM, with its names, labels and meaning.

The names are those of vLLM 0.32 (docs.vllm.ai, "Production Metrics"): KV usage counts blocks of running requests, cached ones are
free; prefix cache queries and hits are in tokens, once per request; prompt tokens count at the first token.
"""

from __future__ import annotations

from typing import Final

from kvpool.process.metrics import MetricsPage

from .engine.engine import Engine
from .engine.stats import CANCELLED
from .engine.stream import EndReason
from .model.facts import ModelFacts

ENGINE: Final = "0"
"""vLLM numbers the engines of one process; a worker is one."""


def fill_vllm_names(page: MetricsPage, engine: Engine, facts: ModelFacts) -> None:
    """Fill in all of vLLM's metrics that kvpool has."""
    labels = {"model_name": facts.name, "engine": ENGINE}
    scheduler, stats, cache = engine.scheduler, engine.stats, engine.cache
    page.gauge("vllm:num_requests_running", "Requests in the running batch.", scheduler.num_running, **labels)
    page.gauge("vllm:num_requests_waiting", "Requests that wait.", scheduler.num_waiting, **labels)
    page.gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", cache.usage, **labels)
    page.gauge(
        "vllm:cache_config_info",
        "Layout of the KV cache.",
        1,
        block_size=str(cache.settings.block_size),
        num_gpu_blocks=str(sum(cache.settings.num_blocks)),
        cache_dtype=facts.dtype,
        enable_prefix_caching=str(engine.settings.prefix_caching),
        engine=ENGINE,
    )
    for name, text, value in (
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_looked_up_tokens),
        ("prefix_cache_hits", "Prompt tokens found there.", stats.num_cached_tokens),
        ("num_preemptions", "Preemptions.", scheduler.num_preemptions),
        ("prompt_tokens", "Prompt tokens processed.", stats.num_prompt_tokens),
        ("generation_tokens", "Tokens generated.", stats.num_generated_tokens),
    ):
        page.counter(f"vllm:{name}", text, value, **labels)
    for reason, count in _finished(engine).items():
        page.counter("vllm:request_success", "Requests that have ended.", count, **labels, finished_reason=reason)
    for name, text, histogram in (
        ("time_to_first_token_seconds", "Time to the first token.", stats.first_token_seconds),
        ("inter_token_latency_seconds", "Time from a token to the next.", stats.inter_token_seconds),
        ("e2e_request_latency_seconds", "Time from arrival to the last token.", stats.request_seconds),
        ("request_queue_time_seconds", "Time from arrival to the first blocks.", stats.queue_seconds),
        ("request_prefill_time_seconds", "Time from the first blocks to the first token.", stats.prefill_seconds),
        ("request_decode_time_seconds", "Time from the first token to the last.", stats.decode_seconds),
        ("request_prompt_tokens", "Prompt tokens of a request.", stats.request_prompt_tokens),
        ("request_generation_tokens", "Generated tokens of a request.", stats.request_generated_tokens),
        ("iteration_tokens_total", "Tokens computed in a step.", stats.step_tokens),
    ):
        page.histogram(f"vllm:{name}", text, histogram, **labels)


def _finished(engine: Engine) -> dict[str, int]:
    """Outcomes of requests under vLLM's names."""
    ended = engine.stats.ended
    whole = {reason.value: ended[reason.value] for reason in EndReason}
    cancelled = ended[CANCELLED]
    return {**whole, "abort": cancelled, "error": ended.total() - sum(whole.values()) - cancelled}
