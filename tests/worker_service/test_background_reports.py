"""What a worker reports to a new manager: first what is in use, then, between other calls, what its idle blocks hold."""

from __future__ import annotations

import pytest

from kvpool.protocol.tokens import pack_tokens
from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache import report as report_module
from kvpool.worker_service.cache.groups.unit import UnitLedger
from kvpool.worker_service.cache.ledger import BlockLedger, Content
from kvpool.worker_service.cache.link_state import BACKOFF_MOST_SECONDS, MutatingCall
from kvpool.worker_service.cache.report import Report
from kvpool.worker_service.cache.reserve import SpareBlock
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from tests.worker_service.windowed import ROOT, Worker, fill

_OLD, _NEW = 1, 9


def _parts(report: Report) -> list[cache_pb2.ReportRequest]:
    """Those that are left."""
    parts = [report.part]
    while not report.next_part():
        parts.append(report.part)
    return parts


def _blocks(parts: list[cache_pb2.ReportRequest]) -> list[int]:
    """Of all contents, in order; 0 where there is none."""
    return [block for part in parts for run in part.contents for block in run.blocks[0].block_ids]


def test_a_block_that_was_granted_after_the_snapshot_is_stated_without_its_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two parts the manager granted 2, in whose place something else is computed now, and 4."""
    monkeypatch.setattr(report_module, "_MAX_BACKGROUND_CONTENTS", 1)
    ledger = BlockLedger(9)
    contents = fill(ledger, 1, *(pack_tokens([block]) for block in (1, 2, 3, 4)))
    report = Report((ledger,), [], [[]])
    while not report.part.contents:
        assert not report.next_part()
    assert _blocks([report.part]) == [1]
    for block in (2, 4):
        ledger.accept_grant(block, _NEW)
    ledger.use(2)
    ledger.complete(2, Content(None, ROOT, pack_tokens([77])))
    ledger.drop(2)
    parts = _parts(report)[1:]
    assert _blocks(parts) == [0, 3]
    assert [run.tokens for part in parts for run in part.contents] == [contents[1].tokens, contents[2].tokens]
    assert [list(part.idle_blocks[0].block_ids) for part in parts if part.idle_blocks] == [[1, 3, 2]]


def test_a_unit_of_which_a_block_was_granted_after_the_snapshot_is_not_reported() -> None:
    """The other one is."""
    ledger = UnitLedger(9)
    for first, digest in ((1, b"a" * 32), (3, b"b" * 32)):
        unit = [first, first + 1]
        for block in unit:
            ledger.accept_grant(block, _OLD)
        ledger.use(*unit)
        ledger.complete_unit(unit, common_pb2.Root(model_fingerprint="m", input_digest=digest), 2, 1)
        for block in unit:
            ledger.drop(block)
    report = Report((ledger,), [], [[]])
    ledger.accept_grant(2, _NEW)
    assert [list(unit.blocks.block_ids) for part in _parts(report) for unit in part.units] == [[3, 4]]


def test_blocks_of_the_reserve_hold_nothing_in_a_report() -> None:
    """A fork has completed block 3 of its own, which the manager hears of when the fork is stated."""
    ledger = BlockLedger(9)
    parent, child = fill(ledger, 2, pack_tokens([2]), pack_tokens([3]))
    ledger.use(3)
    ledger.empty(2)
    parent.blocks[0] = 0
    last = Content(child, ROOT, pack_tokens([4]))
    ledger.accept_grant(4, _OLD)
    ledger.use(4)
    ledger.complete(4, last)
    ledger.drop(4)
    parts = _parts(Report((ledger,), [], [[SpareBlock(3, _OLD)]]))
    assert _blocks(parts) == [0, 0, 4]


def _kind(call: MutatingCall) -> str:
    return type(call.request).__name__.removesuffix("Request")


def _registered() -> tuple[Worker, CacheSequence]:
    """A worker with complete idle blocks 1, 2, 3 and a live sequence, that has lost its session and begun another one."""
    worker = Worker((64,), (), block_size=1, chunk=8)
    worker.end(worker.generate("other", [7, 8, 9], [1]))
    sequence = worker.begin("s", [1, 2, 3], 20)
    worker.cache.state.rate.tokens_per_second = 1000.0  # so that the reserve has all blocks to come
    worker.call()
    worker.cache.state.lose_session("the manager is gone")
    worker.begin_report()
    return worker, sequence


def _served() -> tuple[Worker, CacheSequence]:
    """The same; what is in use is reported."""
    worker, sequence = _registered()
    assert not worker.cache.is_ready()
    while not worker.cache.is_ready():
        call = worker.next_call()
        assert isinstance(call.request, cache_pb2.ReportRequest)
        assert not call.request.contents
        worker.answer(call)
    return worker, sequence


def test_the_worker_works_as_soon_as_what_is_in_use_is_known() -> None:
    """Its cache follows after some other calls each, although more are due."""
    worker, sequence = _served()
    kinds: list[str] = []
    while kinds.count("Report") < 3:
        worker.compute(sequence, len(sequence.tokens))
        worker.now += 1.0
        call = worker.next_call()
        kinds.append(_kind(call))
        worker.answer(call)
    work = ["Append"] * Report.MOST_CALLS_SINCE
    assert kinds == [*work, "Report", *work, "Report", *work, "Report"]


def test_without_work_the_cache_follows_at_once() -> None:
    worker, _ = _served()
    found = []
    while (call := worker.cache.next_call(list, worker.now)) is not None:
        assert isinstance(call.request, cache_pb2.ReportRequest)
        assert worker.cache.next_call_at(worker.now) is None
        found.append(call.request)
        worker.answer(call)
    assert _blocks(found) == [1, 2, 3]
    assert found[-1].last


def test_a_manager_that_is_busy_with_the_caches_of_others_delays_only_this_cache() -> None:
    """Before the worker is served, it is a reason to wait with all calls."""
    worker, sequence = _served()
    report = worker.next_call()
    assert _kind(report) == "Report"
    worker.cache.on_failure(report, "RECOVERING", worker.now)
    retry_at = worker.now + BACKOFF_MOST_SECONDS
    worker.compute(sequence, 3)
    worker.now += 0.1
    append = worker.next_call()
    assert _kind(append) == "Append"
    worker.answer(append)
    assert worker.cache.next_call(list, worker.now) is None
    assert worker.cache.next_call_at(worker.now) == retry_at
    worker.now = retry_at
    again = worker.next_call()
    assert isinstance(again.request, cache_pb2.ReportRequest)
    assert _blocks([again.request]) == [1, 2, 3]
    early, _ = _registered()
    early.cache.on_failure(early.next_call(), "RECOVERING", early.now)
    assert early.cache.next_call(list, early.now) is None
    early.now += BACKOFF_MOST_SECONDS
    assert _kind(early.next_call()) == "Report"


def test_a_manager_that_does_not_answer_a_part_of_the_cache_is_away_for_all_calls() -> None:
    worker, sequence = _served()
    worker.compute(sequence, 3)
    worker.cache.on_failure(worker.next_call(), "", worker.now)
    assert worker.cache.next_call(list, worker.now) is None
    assert sequence.state is SequenceState.LIVE
