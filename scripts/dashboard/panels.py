"""What the dashboard shows: a row for each question, in the order in which an operator asks them.

Queries are PromQL over the jobs kvpool-manager, kvpool-worker and kvpool-gateway of deploy/prometheus. `$worker` are names of
workers, as the manager has them; `$instance` are addresses of workers' metrics pages, as Prometheus has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["stat", "timeseries"]


@dataclass(frozen=True)
class Query:
    """PromQL, and the name of each of its series."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One picture of a row; the panels of a row share its width."""

    title: str
    description: str
    """What it shows, and what to think of it."""
    unit: str
    """One of Grafana's names of units."""
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    stacked: bool = False
    bad_from: float | None = None
    """Red from this value on."""
    bad_below: float | None = None
    """Red below this value."""


@dataclass(frozen=True)
class Row:
    """A question, and what answers it."""

    title: str
    panels: tuple[Panel, ...]


_RATE: Final = "[$__rate_interval]"


def _of_manager(metric: str, **labels: str) -> str:
    """A metric of the manager for the chosen workers."""
    return _selected(metric, {"worker": "$worker", **labels})


def _of_workers(metric: str, **labels: str) -> str:
    """A metric of the chosen workers' own pages."""
    return _selected(metric, {"instance": "$instance", **labels})


def _selected(metric: str, labels: dict[str, str]) -> str:
    chosen = ", ".join(f'{name}=~"{value}"' for name, value in labels.items())
    return f"{metric}{{{chosen}}}"


def _rate(selector: str, by: str) -> str:
    return f"sum by ({by}) (rate({selector}{_RATE}))"


def _quantiles(
    selector: str, names: tuple[tuple[float, str], ...] = ((0.5, "median"), (0.95, "95 %"))
) -> tuple[Query, ...]:
    """Of a histogram, over all of its series together."""
    rates = _rate(selector, "le")
    return tuple(Query(f"histogram_quantile({quantile}, {rates})", name) for quantile, name in names)


UP: Final = Row(
    "Is it up?",
    (
        Panel(
            "Managers",
            "Managers that answer their metrics page; one that stands by is counted.",
            "short",
            (Query('sum(up{job="kvpool-manager"}) or vector(0)', "managers"),),
            "stat",
            bad_below=1,
        ),
        Panel(
            "Managers that lead",
            "1; for a moment 0 while the next one takes over.",
            "short",
            (Query("sum(kvpool_manager_leads) or vector(0)", "managers"),),
            "stat",
            bad_below=1,
        ),
        Panel(
            "Workers that serve",
            "Live sessions that take new requests. Workers that report (recovering) or leave (draining) are not counted.",
            "short",
            (Query('sum(kvpool_manager_sessions{state="serving"}) or vector(0)', "workers"),),
            "stat",
            bad_below=1,
        ),
        Panel(
            "Pages that do not answer",
            "Targets of Prometheus that cannot be scraped: the process is down, or cannot be reached.",
            "short",
            (Query('count(up{job=~"kvpool-.*"} == 0) or vector(0)', "targets"),),
            "stat",
            bad_from=1,
        ),
        Panel(
            "Broken laws",
            "What audits (kvpool check) have found in the manager's accounts since it started. Anything but 0 is a mistake in "
            "kvpool.",
            "short",
            (Query("sum(kvpool_manager_violations_total) or vector(0)", "violations"),),
            "stat",
            bad_from=1,
        ),
        Panel(
            "Uptime",
            "Since each process started.",
            "s",
            (Query('time() - process_start_time_seconds{job=~"kvpool-.*"}', "{{job}} {{instance}}"),),
        ),
    ),
)

SPEED: Final = Row(
    "How fast is it?",
    (
        Panel(
            "Time to the first token",
            "From a request's arrival at a worker to its first token: waiting and prefill.",
            "s",
            _quantiles(_of_workers("kvpool_worker_time_to_first_token_seconds_bucket")),
        ),
        Panel(
            "Time between tokens",
            "From a token to the next of the same request, as a reader sees it.",
            "s",
            _quantiles(_of_workers("kvpool_worker_inter_token_seconds_bucket"), ((0.5, "median"), (0.99, "99 %"))),
        ),
        Panel(
            "Time of a whole answer",
            "From arrival to the last token of complete answers.",
            "s",
            _quantiles(_of_workers("kvpool_worker_request_duration_seconds_bucket")),
        ),
        Panel(
            "Tokens per second",
            "Generated: sampled. Prefilled: computed before a first token. From the cache: prompt tokens that were not computed.",
            "short",
            (
                Query(f"sum(rate({_of_workers('kvpool_worker_generated_tokens_total')}{_RATE}))", "generated"),
                Query(f"sum(rate({_of_workers('kvpool_worker_prefilled_tokens_total')}{_RATE}))", "prefilled"),
                Query(f"sum(rate({_of_workers('kvpool_worker_cached_tokens_total')}{_RATE}))", "from the cache"),
            ),
        ),
        Panel(
            "Time of a step",
            "One forward pass of the model over the whole batch.",
            "s",
            _quantiles(_of_workers("kvpool_worker_step_duration_seconds_bucket")),
        ),
        Panel(
            "Batch",
            "Sequences and tokens in a step, mean.",
            "short",
            tuple(
                Query(
                    f"sum(rate({_of_workers(f'kvpool_worker_step_{what}_sum')}{_RATE})) / "
                    f"sum(rate({_of_workers(f'kvpool_worker_step_{what}_count')}{_RATE}))",
                    what,
                )
                for what in ("sequences", "tokens")
            ),
        ),
    ),
)

CACHE: Final = Row(
    "What does the cache do?",
    (
        Panel(
            "Hit rate",
            "Share of the prompt tokens that the cache served instead of computing them.",
            "percentunit",
            (
                Query(
                    f"{_rate(_of_manager('kvpool_manager_cached_tokens_total'), 'worker')} / "
                    f"{_rate(_of_manager('kvpool_manager_prompt_tokens_total'), 'worker')}",
                    "{{worker}}",
                ),
            ),
        ),
        Panel(
            "Blocks by state",
            "free: empty; cached: content that nobody holds, evicted when blocks are needed; held: in tables of running requests; "
            "reserved: granted ahead of need; withheld: beyond the budget of all workers.",
            "short",
            (Query(f"sum by (state) ({_of_manager('kvpool_manager_blocks')})", "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "Blocks that are held, of all",
            "Near 100 % nothing stays cached, and requests wait or are preempted.",
            "percentunit",
            (
                Query(
                    f"sum by (worker) ({_of_manager('kvpool_manager_blocks', state='held|reserved')}) / "
                    f"sum by (worker) ({_of_manager('kvpool_manager_capacity_blocks')})",
                    "{{worker}}",
                ),
            ),
            bad_from=0.98,
        ),
        Panel(
            "Shared blocks",
            "Held blocks that are in the tables of several requests: each was computed once.",
            "short",
            (Query(f"sum by (worker) ({_of_manager('kvpool_manager_shared_blocks')})", "{{worker}}"),),
        ),
        Panel(
            "Evictions",
            "Cached blocks per second that were dropped for an allocation. Many, with a low hit rate: the pool is too small for "
            "what is asked again.",
            "ops",
            (Query(_rate(_of_manager("kvpool_manager_evicted_blocks_total"), "worker"), "{{worker}}"),),
        ),
        Panel(
            "Prefix tree",
            "Nodes over all workers, and ended sessions whose entries are still in the tree.",
            "short",
            (
                Query("sum(kvpool_manager_prefix_nodes)", "nodes"),
                Query("sum(kvpool_manager_unswept_sessions)", "sessions to sweep"),
            ),
        ),
    ),
)

WAITING: Final = Row(
    "What waits?",
    (
        Panel(
            "Requests",
            "Running: in the batch. Waiting: for a place in it, or for blocks.",
            "short",
            (Query(f"sum by (state) ({_of_workers('kvpool_worker_requests')})", "{{state}}"),),
        ),
        Panel(
            "Time in the queue",
            "From a request's arrival to its first blocks.",
            "s",
            _quantiles(_of_workers("kvpool_worker_request_queue_seconds_bucket")),
        ),
        Panel(
            "How full the queue is",
            "Waiting requests, of --max-num-waiting; at 100 % new ones are refused.",
            "percentunit",
            (
                Query(
                    f"{_of_workers('kvpool_worker_requests', state='waiting')} / ignoring(state) "
                    f"{_of_workers('kvpool_worker_waiting_limit')}",
                    "{{instance}}",
                ),
            ),
            bad_from=0.8,
        ),
        Panel(
            "Preemptions",
            "Running requests per second that lost their blocks and are computed again: the pool is too small for the batch.",
            "ops",
            (Query(_rate(_of_workers("kvpool_worker_preemptions_total"), "instance"), "{{instance}}"),),
        ),
        Panel(
            "Decodes that waited for a call",
            "Tokens per second that came a step later because the reserve was empty; raise --reserve-seconds.",
            "ops",
            (
                Query(
                    _rate(_of_workers("kvpool_worker_decodes_that_waited_for_a_call_total"), "instance"), "{{instance}}"
                ),
            ),
        ),
        Panel(
            "Budget of all workers",
            "Blocks, token slots and tokens of sequences, of the manager's limits. At 100 % pools stop growing, and new sequences "
            "wait.",
            "percentunit",
            (Query("kvpool_manager_budget_used / kvpool_manager_budget_limit", "{{kind}}"),),
            bad_from=0.9,
        ),
    ),
)

FAILING: Final = Row(
    "What fails?",
    (
        Panel(
            "Requests that ended early",
            "Per second and by reason; cancelled: the reader went away.",
            "ops",
            (
                Query(
                    _rate(
                        'kvpool_worker_requests_ended_total{instance=~"$instance", outcome!~"stop|length"}', "outcome"
                    ),
                    "{{outcome}}",
                ),
            ),
        ),
        Panel(
            "Requests refused by workers",
            "Per second and by reason; busy: the queue is full; invalid: the caller's mistake.",
            "ops",
            (Query(_rate(_of_workers("kvpool_worker_requests_refused_total"), "reason"), "{{reason}}"),),
        ),
        Panel(
            "Refusals of the manager",
            "Calls and items of batches per second, by reason. no_blocks is part of normal work under load.",
            "ops",
            (Query(_rate("kvpool_manager_refusals_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Calls that fail",
            "Calls to the manager per second that were answered with another status than OK.",
            "ops",
            (
                Query(
                    f'sum by (method, code) (rate(kvpool_manager_calls_total{{code!="OK"}}{_RATE}))',
                    "{{method}} {{code}}",
                ),
            ),
        ),
        Panel(
            "Workers' calls that fail",
            "Calls per second that the manager did not execute or answer, as workers count them.",
            "ops",
            (Query(_rate(_of_workers("kvpool_worker_manager_calls_failed_total"), "instance"), "{{instance}}"),),
        ),
        Panel(
            "Servers built anew",
            "gRPC servers that ended unexpectedly and were replaced, since the start of the process.",
            "short",
            (
                Query("sum by (instance) (kvpool_manager_server_rebuilds_total)", "manager {{instance}}"),
                Query(
                    f"sum by (instance) ({_of_workers('kvpool_worker_server_rebuilds_total')})", "worker {{instance}}"
                ),
            ),
        ),
    ),
)

RECOVERY: Final = Row(
    "What recovers?",
    (
        Panel(
            "Sessions",
            "Live sessions by state; recovering: the worker reports what it holds and gets no requests yet.",
            "short",
            (Query("sum by (state) (kvpool_manager_sessions)", "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "Sessions that have ended",
            "By reason, since the manager started. expired: a worker died, froze or was cut off; fenced: it registered again.",
            "short",
            (Query("sum by (reason) (kvpool_manager_sessions_ended_total)", "{{reason}}"),),
        ),
        Panel(
            "Lease that remains",
            "Until a session ends unless it is renewed; each worker renews its lease every second.",
            "s",
            (Query(_of_manager("kvpool_manager_lease_remaining_seconds"), "{{worker}}"),),
        ),
        Panel(
            "Reports",
            "Complete reports of workers, and the mean time of one since the manager started, in seconds.",
            "short",
            (
                Query("sum(kvpool_manager_reports_total)", "reports"),
                Query(
                    "sum(kvpool_manager_report_duration_seconds_sum) / (sum(kvpool_manager_report_duration_seconds_count) > 0) "
                    "or vector(0)",
                    "mean seconds",
                ),
            ),
        ),
        Panel(
            "What was reported",
            "Blocks and sequences of reports by what they became, since the manager started.",
            "short",
            (Query("sum by (case) (kvpool_manager_reported_entries_total)", "{{case}}"),),
        ),
        Panel(
            "Epochs",
            "Lives of the manager: its own, and the largest that each worker has seen. They are equal while all is well.",
            "short",
            (
                Query("max(kvpool_manager_epoch)", "manager"),
                Query(f"max by (instance) ({_of_workers('kvpool_worker_manager_epoch')})", "{{instance}}"),
            ),
        ),
    ),
)

MANAGER: Final = Row(
    "Is the manager busy?",
    (
        Panel(
            "Calls",
            "Calls answered per second, by method.",
            "ops",
            (Query(_rate("kvpool_manager_calls_total", "method"), "{{method}}"),),
        ),
        Panel(
            "Time of a call",
            "99 % of the calls of a method are answered within this time.",
            "s",
            (
                Query(
                    f"histogram_quantile(0.99, {_rate('kvpool_manager_call_duration_seconds_bucket', 'method, le')})",
                    "{{method}}",
                ),
            ),
        ),
        Panel(
            "Processor",
            "Cores that each process uses. The manager has one loop: near 1 it is the bottleneck.",
            "short",
            (Query('rate(process_cpu_seconds_total{job=~"kvpool-.*"}[$__rate_interval])', "{{job}} {{instance}}"),),
        ),
        Panel(
            "Memory",
            "Resident memory of each process; a worker's KV cache is part of it on a CPU.",
            "bytes",
            (Query('process_resident_memory_bytes{job=~"kvpool-.*"}', "{{job}} {{instance}}"),),
        ),
        Panel(
            "Open files",
            "File descriptors in use, of the limit; connections are most of them.",
            "percentunit",
            (
                Query(
                    'process_open_fds{job=~"kvpool-.*"} / process_max_fds{job=~"kvpool-.*"}',
                    "{{job}} {{instance}}",
                ),
            ),
            bad_from=0.8,
        ),
        Panel(
            "Audits",
            "Audits of every law since the manager started; kvpool check runs one.",
            "short",
            (Query("sum(kvpool_manager_audits_total)", "audits"),),
        ),
    ),
)

GATEWAY: Final = Row(
    "What does the gateway do?",
    (
        Panel(
            "Requests by status",
            "HTTP requests per second. 4xx is the caller's, 429 a full queue, 503 no worker or no manager, 504 a deadline.",
            "ops",
            (Query(_rate("kvpool_gateway_requests_total", "status"), "{{status}}"),),
        ),
        Panel(
            "Requests by route",
            "HTTP requests per second.",
            "ops",
            (Query(_rate("kvpool_gateway_requests_total", "route"), "{{route}}"),),
        ),
        Panel(
            "First token over HTTP",
            "From a request for text to its first token, at the gateway.",
            "s",
            _quantiles("kvpool_gateway_first_token_seconds_bucket"),
        ),
        Panel(
            "Open streams",
            "Answers that are being generated.",
            "short",
            (Query("sum by (instance) (kvpool_gateway_open_streams)", "{{instance}}"),),
        ),
        Panel(
            "Bytes sent",
            "Bodies of answers, per second.",
            "Bps",
            (Query(_rate("kvpool_gateway_sent_bytes_total", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Connections",
            "Open ones, and browsers among them that follow the cluster.",
            "short",
            (
                Query("sum by (instance) (kvpool_gateway_connections)", "{{instance}}"),
                Query("sum by (instance) (kvpool_gateway_viewers)", "{{instance}} pages"),
            ),
        ),
        Panel(
            "Cut off",
            "Per second: connections that reached a limit, and answers whose reader went away.",
            "ops",
            (
                Query(_rate("kvpool_gateway_connections_ended_total", "limit"), "{{limit}}"),
                Query("sum(rate(kvpool_gateway_lost_readers_total[$__rate_interval]))", "reader left"),
            ),
        ),
    ),
)

ROWS: Final = (UP, SPEED, CACHE, WAITING, FAILING, RECOVERY, MANAGER, GATEWAY)
