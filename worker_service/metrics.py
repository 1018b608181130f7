"""A worker's /metrics, under kvpool's names and vLLM's. Reads the counts of other modules, keeps none.

Labels are settings, enums and the model's name, so the number of series is fixed at the start.

vLLM's names, labels and meaning, for routers and dashboards made for it, are those of vLLM 0.32 (docs.vllm.ai, "Production
Metrics"): KV usage counts blocks of running requests, cached ones are free; prefix cache queries and hits are in tokens, once per
request; prompt tokens count at the first token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvpool.process.metrics import MetricsPage
from kvpool.process.version import installed_version
from kvpool.v1 import worker_pb2

from .engine.engine import Engine
from .engine.errors import ErrorKind
from .engine.stats import CANCELLED
from .engine.stream import EndReason
from .manager_link import ManagerLink

OUTCOMES: Final = (
    *(reason.name.lower() for reason in EndReason),
    CANCELLED,
    *(kind.name.lower() for kind in ErrorKind),
)


_PREEMPTIONS: Final = "Times a running request lost its blocks and was computed again."
_WAITED: Final = "Decodes that skipped a step for lack of a spare block although the pool had some."
_NOT_NAMED: Final = "Windows and snapshots not kept for other prompts, because no block was left for them."
_REBUILDS: Final = "gRPC servers that ended unexpectedly and were replaced."


class WorkerMetrics:
    """Fills the page of one worker."""

    def __init__(
        self,
        engine: Engine,
        link: ManagerLink,
        facts: worker_pb2.ModelFacts,
        kv_cache_bytes: int,
        num_server_rebuilds: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._link = link
        self._facts = facts
        self._kv_cache_bytes = kv_cache_bytes
        self._num_server_rebuilds = num_server_rebuilds

    def fill(self, page: MetricsPage) -> None:
        """Fill in all metrics as they are now. Call it on the event loop."""
        self._fill_engine(page)
        self._fill_cache(page)
        self._fill_link(page)
        fill_vllm_names(page, self._engine, self._facts)

    def _fill_engine(self, page: MetricsPage) -> None:
        scheduler, stats = self._engine.scheduler, self._engine.stats
        for state, number in (("running", scheduler.num_running), ("waiting", scheduler.num_waiting)):
            page.gauge("kvpool_worker_requests", "Requests here now, by state.", number, state=state)
        limit = self._engine.settings.max_num_waiting
        page.gauge("kvpool_worker_waiting_limit", "Waiting requests; more are refused.", limit)
        text = (
            "Accepted requests that have ended: stop and length are complete answers, cancelled ones lost their reader."
        )
        for outcome in OUTCOMES:
            page.counter("kvpool_worker_requests_ended", text, stats.ended[outcome], outcome=outcome)
        text = "Requests that were not accepted, by reason."
        for kind in ErrorKind:
            page.counter("kvpool_worker_requests_refused", text, stats.refused[kind], reason=kind.name.lower())
        for name, text, histogram in (
            ("request_queue_seconds", "From arrival to the first block table.", stats.queue_seconds),
            ("time_to_first_token_seconds", "From arrival to the first token.", stats.first_token_seconds),
            ("inter_token_seconds", "From a token to the next of the same request.", stats.inter_token_seconds),
            ("request_duration_seconds", "From arrival to the last token of a complete answer.", stats.request_seconds),
            ("step_duration_seconds", "Time of a step of the model.", stats.step_seconds),
            ("step_sequences", "Sequences in a step: the batch.", stats.step_sequences),
            ("step_tokens", "Tokens computed in a step.", stats.step_tokens),
        ):
            page.histogram(f"kvpool_worker_{name}", text, histogram)
        num_prefilled = stats.num_forwarded_tokens - stats.num_decoded_tokens
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of requests with blocks.", stats.num_admitted_tokens),
            ("cached_tokens", "Prompt tokens that the cache served.", stats.num_cached_tokens),
            ("prefilled_tokens", "Tokens computed before a first token or after a preemption.", num_prefilled),
            ("generated_tokens", "Tokens sampled.", stats.num_generated_tokens),
            ("preemptions", _PREEMPTIONS, scheduler.num_preemptions),
        ):
            page.counter(f"kvpool_worker_{name}", text, value)

    def _fill_cache(self, page: MetricsPage) -> None:
        cache = self._engine.cache
        for name, text, values in (
            ("capacity_blocks", "Blocks that can be granted.", [count - 1 for count in cache.settings.num_blocks]),
            ("held_blocks", "Blocks in tables, shared ones once.", cache.num_used_blocks),
            ("reserve_blocks", "Blocks granted ahead of need.", cache.num_spare_blocks),
        ):
            for group, value in enumerate(values):
                page.gauge(f"kvpool_worker_{name}", text, value, group=str(group))
        page.gauge("kvpool_worker_kv_cache_bytes", "Size of the KV cache.", self._kv_cache_bytes)
        counts = [("decodes_that_waited_for_a_call", _WAITED, cache.num_reserve_waits)]
        if cache.settings.keeping_boundaries:
            counts += [
                ("windows_named", "Windows and snapshots kept for other prompts.", cache.state.num_windows_named),
                ("windows_not_named", _NOT_NAMED, cache.state.num_windows_not_named),
            ]
        for name, text, count in counts:
            page.counter(f"kvpool_worker_{name}", text, count)

    def _fill_link(self, page: MetricsPage) -> None:
        engine, link, facts = self._engine, self._link, self._facts
        page.gauge(
            "kvpool_worker_info",
            "Version, model and device.",
            1,
            version=installed_version(),
            model_name=facts.model_name,
            dtype=facts.dtype,
            device=facts.device,
        )
        for name, text, value in (
            ("session_open", "Whether the manager serves this worker.", engine.cache.is_ready()),
            ("draining", "Whether new requests are refused.", engine.is_draining),
            ("manager_epoch", "Largest epoch of the manager seen.", link.highest_epoch),
        ):
            page.gauge(f"kvpool_worker_{name}", text, value)
        for name, text, value in (
            ("sessions", "Registrations that the manager accepted.", link.num_sessions),
            ("manager_calls", "Mutating calls to the manager.", engine.cache.num_calls),
            ("manager_calls_failed", "Mutating calls that were not executed or not answered.", link.num_failed_calls),
            ("server_rebuilds", _REBUILDS, self._num_server_rebuilds()),
        ):
            page.counter(f"kvpool_worker_{name}", text, value)


ENGINE: Final = "0"
"""vLLM numbers the engines of one process; a worker is one."""


def fill_vllm_names(page: MetricsPage, engine: Engine, facts: worker_pb2.ModelFacts) -> None:
    """Fill in all of vLLM's metrics that kvpool has."""
    labels = {"model_name": facts.model_name, "engine": ENGINE}
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
    whole = {name: stats.ended[name] for name in (reason.name.lower() for reason in EndReason)}
    failed = stats.ended.total() - sum(whole.values()) - stats.ended[CANCELLED]
    for reason, count in {**whole, "abort": stats.ended[CANCELLED], "error": failed}.items():
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
