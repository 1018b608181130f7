"""Fills the manager's /metrics from counts that the core and the edge keep.

Labels are enums, methods, and the names of live workers, of which there are at most `Limits.max_workers`. No label comes from a
client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from google.rpc import code_pb2

from kvpool.process.metrics import MetricsPage
from kvpool.process.request_guard import MALFORMED, TOO_LARGE
from kvpool.process.version import installed_version

from .audits import Audits
from .core.block_pool import BlockPool
from .core.manager import CacheManager
from .core.refusal import Reason
from .core.restored import Case
from .core.session import Session, SessionEnd
from .counts import METHODS, EdgeCounts

_OF_A_BUG: Final = code_pb2.Code.Name(code_pb2.INTERNAL)


class ManagerMetrics:
    """Fills the page of one manager."""

    def __init__(self, counts: EdgeCounts, num_server_rebuilds: Callable[[], int]) -> None:
        self._counts = counts
        self._num_server_rebuilds = num_server_rebuilds

    def fill_process(self, page: MetricsPage, *, leads: bool) -> None:
        """Write the rows that a process that stands by has too."""
        page.gauge("kvpool_manager_info", "Version of the process.", 1, version=installed_version())
        page.gauge(
            "kvpool_manager_leads",
            "1: this process leads; 0: it stands by, and has no other rows but its version and kvpool_manager_server_rebuilds.",
            int(leads),
        )
        page.counter(
            "kvpool_manager_server_rebuilds",
            "gRPC servers that ended unexpectedly and were replaced.",
            self._num_server_rebuilds(),
        )

    def fill(self, page: MetricsPage, manager: CacheManager, audits: Audits, now: float) -> None:
        """Write the rows of a process that leads. `now` is the monotonic time of the leases, in seconds. Call it on the event
        loop."""
        _fill_manager(page, manager, audits)
        self._fill_calls(page)
        self._fill_reports(page, manager)
        for session in manager.sessions:
            _fill_worker(page, session, now)

    def _fill_calls(self, page: MetricsPage) -> None:
        counts = self._counts
        # From 0: of a counter that begins with 1 no rate is known, and alerts ask for this one.
        calls = {(method, _OF_A_BUG): 0 for method in METHODS} | counts.calls
        for (method, code), number in sorted(calls.items()):
            page.counter(
                "kvpool_manager_calls", "Calls answered, by method and status.", number, method=method, code=code
            )
        page.gauge("kvpool_manager_calls_under_way", "Calls in flight.", counts.num_under_way)
        for method, seconds in counts.call_seconds.items():
            page.histogram(
                "kvpool_manager_call_duration_seconds", "From the parsed request to its answer.", seconds, method=method
            )
        refusals = {reason.value: counts.refusals[reason] for reason in Reason}
        refusals |= {reason: counts.unread[reason] for reason in (MALFORMED, TOO_LARGE)}
        for reason, number in refusals.items():
            page.counter(
                "kvpool_manager_refusals",
                "Calls, and items of batches, that were refused.",
                number,
                reason=reason.lower(),
            )

    def _fill_reports(self, page: MetricsPage, manager: CacheManager) -> None:
        page.counter("kvpool_manager_reports", "Complete reports of workers.", manager.num_reports)
        page.histogram(
            "kvpool_manager_report_duration_seconds",
            "From a worker's Register to the last part of its report.",
            self._counts.report_seconds,
        )
        for case in Case:
            page.counter(
                "kvpool_manager_reported_entries",
                "Blocks and sequences of reports, by what they became.",
                manager.reconciled[case],
                case=case.value,
            )


def _fill_manager(page: MetricsPage, manager: CacheManager, audits: Audits) -> None:
    page.gauge("kvpool_manager_epoch", "This life of the manager.", manager.epoch)
    page.gauge("kvpool_manager_prefix_nodes", "Nodes of the prefix tree, over all workers.", manager.num_prefix_nodes)
    page.gauge(
        "kvpool_manager_unswept_sessions",
        "Ended sessions that still have entries in the tree.",
        manager.num_unswept_sessions,
    )
    budget = manager.budget
    for kind, used, limit in (
        ("blocks", budget.num_blocks, budget.max_blocks),
        ("token_slots", budget.num_slots, budget.max_tokens),
        ("sequence_tokens", budget.num_sequence_tokens, budget.max_tokens),
    ):
        page.gauge(
            "kvpool_manager_budget_used",
            "What all workers use of a budget: blocks granted, their token_slots, sequence_tokens of live sequences.",
            used,
            kind=kind,
        )
        page.gauge("kvpool_manager_budget_limit", "What all workers may use of it.", limit, kind=kind)
    states = [_state(session) for session in manager.sessions]
    for state in ("serving", "recovering", "draining"):
        page.gauge("kvpool_manager_sessions", "Live sessions.", states.count(state), state=state)
    for end in SessionEnd:
        page.counter(
            "kvpool_manager_sessions_ended",
            "Sessions that have ended, by reason.",
            manager.ended[end],
            reason=end.value,
        )
    page.counter("kvpool_manager_audits", "Audits of every law.", audits.num_audits)
    page.counter("kvpool_manager_violations", "Broken laws that audits have found.", audits.num_violations)


def _fill_worker(page: MetricsPage, session: Session, now: float) -> None:
    """Write the rows of one worker. Its counters restart with each session, as those of a process do."""
    worker = session.worker_id
    load = session.load
    page.gauge(
        "kvpool_manager_worker_info",
        "Address and model of a worker.",
        1,
        worker=worker,
        address=session.registration.address,
        model_name=session.registration.model_name,
    )
    for group, pool in enumerate(session.pools):
        _fill_pool(page, worker, str(group), pool)
    page.gauge("kvpool_manager_sequences", "Live sequences.", len(session.sequences), worker=worker)
    for state, number in (("running", load.num_running), ("waiting", load.num_waiting)):
        page.gauge(
            "kvpool_manager_requests", "Requests, as the worker reports them.", number, worker=worker, state=state
        )
    page.gauge(
        "kvpool_manager_lease_remaining_seconds",
        "Until the session ends unless it is renewed.",
        max(0.0, session.lease_end - now),
        worker=worker,
    )
    for name, text, number in (
        ("prompt_tokens", "Prompt tokens of granted sequences.", session.num_prompt_tokens),
        ("cached_tokens", "Prompt tokens that the cache served.", session.num_cached_tokens),
        ("generated_tokens", "Tokens that the worker has stated after the prompts.", session.num_generated_tokens),
        ("evicted_blocks", "Cached blocks dropped for an allocation.", sum(pool.num_evicted for pool in session.pools)),
    ):
        page.counter(f"kvpool_manager_{name}", text, number, worker=worker)


def _fill_pool(page: MetricsPage, worker: str, group: str, pool: BlockPool) -> None:
    counts = pool.counts()
    for name, text, number in (
        ("capacity_blocks", "Blocks that can be granted.", counts.capacity),
        ("shared_blocks", "Held blocks in several tables.", counts.shared),
    ):
        page.gauge(f"kvpool_manager_{name}", text, number, worker=worker, group=group)
    for state in ("free", "cached", "held", "reserved", "withheld"):
        page.gauge(
            "kvpool_manager_blocks",
            "Blocks by state; withheld: never granted, and beyond the budget of all workers.",
            getattr(counts, state),
            worker=worker,
            group=group,
            state=state,
        )


def _state(session: Session) -> str:
    if session.recovering:
        return "recovering"
    return "draining" if session.draining else "serving"
