"""What a worker reports to a new manager: first what is in use, then, between other calls, what its idle blocks hold."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.protocol.tokens import pack_tokens
from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache import report as report_module
from kvpool.worker_service.cache.engine_cache import Computed, EngineCache
from kvpool.worker_service.cache.groups.dense import DenseGroup
from kvpool.worker_service.cache.groups.unit import UnitLedger
from kvpool.worker_service.cache.ledger import BlockLedger, Content
from kvpool.worker_service.cache.link_state import BACKOFF_MOST_SECONDS, MutatingCall
from kvpool.worker_service.cache.report import Report
from kvpool.worker_service.cache.reserve import SpareBlock
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from kvpool.worker_service.cache.settings import CacheSettings

_ROOT = common_pb2.Root(model_fingerprint="m")
_OLD, _NEW = 5, 9


def _chain(ledger: BlockLedger, *blocks: int) -> list[Content]:
    """Complete and idle blocks, each after the one before."""
    contents: list[Content] = []
    for block in blocks:
        ledger.accept_grant(block, _OLD)
        ledger.use(block)
        contents.append(Content(contents[-1] if contents else None, _ROOT, pack_tokens([block])))
        ledger.complete(block, contents[-1])
        ledger.drop(block)
    return contents


def _parts(report: Report) -> list[cache_pb2.ReportRequest]:
    """Those that are left."""
    parts = [report.part]
    while not report.next_part():
        parts.append(report.part)
    return parts


def _blocks(parts: list[cache_pb2.ReportRequest]) -> list[int]:
    """Of all contents, in order; 0 where there is none."""
    return [block for part in parts for run in part.contents for block in run.blocks[0].block_ids]


def test_what_is_in_use_comes_before_what_is_idle() -> None:
    """And a worker whose blocks are all in use is done with it."""
    ledger = BlockLedger(9)
    _chain(ledger, 1, 2, 3)
    parts = _parts(Report((ledger,), [], [[]]))
    assert [part.live for part in parts].index(True) < [bool(part.contents) for part in parts].index(True)
    assert [list(part.idle_blocks[0].block_ids) for part in parts if part.idle_blocks] == [[1, 2, 3]] * 2
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    (only,) = _parts(Report((BlockLedger(9),), [], [[]]))
    assert only.live
    assert only.last


def test_reserves_and_idle_blocks_are_those_of_all_groups_in_as_many_parts_as_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report_module, "_MAX_BLOCKS", 4)
    ledgers = (BlockLedger(9), BlockLedger(9, 1))
    _chain(ledgers[0], 1, 2, 3)
    reserves = [[SpareBlock(4, _OLD)], [SpareBlock(block, _OLD) for block in (5, 6, 7)]]
    report = Report(ledgers, [], reserves)
    in_use = [report.part]
    while not report.part.live:
        report.next_part()
        in_use.append(report.part)
    reserved = [(run.group, block) for part in in_use for run in part.reserve for block in run.block_ids]
    assert sorted(reserved) == [(0, 4), (1, 5), (1, 6), (1, 7)]
    assert [block for part in in_use for one in part.idle_blocks for block in one.block_ids] == [1, 2, 3]
    assert len(in_use) == 3


def test_a_block_that_was_granted_after_the_snapshot_is_stated_without_its_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two parts the manager granted 2, in whose place something else is computed now, and 4."""
    monkeypatch.setattr(report_module, "_MAX_BACKGROUND_CONTENTS", 1)
    ledger = BlockLedger(9)
    contents = _chain(ledger, 1, 2, 3, 4)
    report = Report((ledger,), [], [[]])
    while not report.part.contents:
        assert not report.next_part()
    assert _blocks([report.part]) == [1]
    for block in (2, 4):
        ledger.accept_grant(block, _NEW)
    ledger.use(2)
    ledger.complete(2, Content(None, _ROOT, pack_tokens([77])))
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
    parent, child = _chain(ledger, 2, 3)
    ledger.use(3)
    ledger.forget(2)
    parent.blocks[0] = 0
    last = Content(child, _ROOT, pack_tokens([4]))
    ledger.accept_grant(4, _OLD)
    ledger.use(4)
    ledger.complete(4, last)
    ledger.drop(4)
    parts = _parts(Report((ledger,), [], [[SpareBlock(3, _OLD)]]))
    assert _blocks(parts) == [0, 0, 4]


class _Worker:
    """A cache with complete idle blocks and a live sequence, that has lost its manager and found the next one."""

    def __init__(self) -> None:
        self.cache = EngineCache(CacheSettings(block_size=1, groups=(DenseGroup(64),), report_seconds=0.0))
        self.cache.on_registered(cache_pb2.RegisterResponse(epoch=1, session=1))
        self.sequence = CacheSequence("s", 1, _ROOT, [1, 2, 3], max_new_tokens=20)
        granted = cache_pb2.AllocateResponse()
        grant = granted.downlink.entries.add(number=1).grant
        grant.block_ids[:], grant.generations[:] = range(10, 30), [1] * 20
        granted.results.add().granted.tables.add(block_ids=[1, 2, 3], generations=[1] * 3)
        self.reply(self.call(self.sequence), granted)
        other = CacheSequence("other", 1, _ROOT, [7, 8, 9], max_new_tokens=1)
        granted = cache_pb2.AllocateResponse()
        granted.results.add().granted.tables.add(block_ids=[4, 5, 6], generations=[2] * 3)
        self.reply(self.call(other), granted)
        self.step(other, 3)
        self.cache.free(other)
        while (call := self.cache.next_call(list, 0.0)) is not None:
            if isinstance(call.request, cache_pb2.FreeRequest):
                self.reply(call, cache_pb2.FreeResponse())
            else:
                answer = cache_pb2.AppendResponse()
                for _ in call.stated:
                    answer.results.add()
                self.reply(call, answer)
        self.cache.lose("the manager is gone")
        self.cache.on_registered(cache_pb2.RegisterResponse(epoch=2, session=2, report_wanted=True))

    def call(self, *candidates: CacheSequence, now: float = 0.0) -> MutatingCall:
        """The next one, which must be there."""
        call = self.cache.next_call(lambda: list(candidates), now)
        assert call is not None
        return call

    def reply(self, call: MutatingCall, response: Any) -> None:
        self.cache.on_reply(call, response, 0.0)

    def step(self, sequence: CacheSequence, num_tokens: int) -> None:
        """One step of the engine computes so many tokens of one sequence."""
        assert self.cache.extend(sequence, sequence.num_computed_tokens + num_tokens)
        self.cache.begin_step([sequence])
        self.cache.end_step([Computed(sequence, sequence.num_computed_tokens + num_tokens, None)], 0.0)

    def until_live(self) -> None:
        """Answer the parts with what is in use."""
        assert not self.cache.is_ready()
        while not self.cache.is_ready():
            call = self.call()
            assert isinstance(call.request, cache_pb2.ReportRequest)
            assert not call.request.contents
            self.reply(call, cache_pb2.ReportResponse())


def kind(call: MutatingCall) -> str:
    """Its method."""
    return type(call.request).__name__.removesuffix("Request")


def test_the_worker_works_as_soon_as_what_is_in_use_is_known() -> None:
    """Its cache follows after some other calls each, although more are due."""
    worker = _Worker()
    worker.until_live()
    worker.step(worker.sequence, 3)
    kinds = []
    for number in range(12):
        call = worker.call()
        kinds.append(kind(call))
        downlink = cache_pb2.Downlink()
        downlink.entries.add(number=number + 1).grant.MergeFrom(
            common_pb2.BlockRun(block_ids=[40 + number], generations=[3])
        )
        if isinstance(call.request, cache_pb2.ReportRequest):
            worker.reply(call, cache_pb2.ReportResponse(downlink=downlink))
        else:
            results = [cache_pb2.AppendResult() for _ in call.stated]
            worker.reply(call, cache_pb2.AppendResponse(downlink=downlink, results=results))
        worker.cache.add_token(worker.sequence, number)
        worker.step(worker.sequence, 1)
        if kinds.count("Report") == 3:
            break
    work = ["Append"] * Report.MOST_CALLS_SINCE
    assert kinds == [*work, "Report", *work, "Report", *work, "Report"]
    assert worker.cache.next_call(list, 0.0) is not None


def test_without_work_the_cache_follows_at_once() -> None:
    worker = _Worker()
    worker.until_live()
    found = []
    while (call := worker.cache.next_call(list, 0.0)) is not None:
        assert isinstance(call.request, cache_pb2.ReportRequest)
        assert worker.cache.next_call_at(0.0) is None
        found.append(call.request)
        worker.reply(call, cache_pb2.ReportResponse())
    assert _blocks(found) == [4, 5, 6]
    assert found[-1].last


def test_a_manager_that_is_busy_with_the_caches_of_others_delays_only_this_cache() -> None:
    """Before the worker is served, it is a reason to wait with all calls."""
    worker = _Worker()
    worker.until_live()
    report = worker.call()
    assert kind(report) == "Report"
    worker.cache.on_failure(report, "RECOVERING", 0.0)
    worker.step(worker.sequence, 3)
    append = worker.call()
    assert kind(append) == "Append"
    worker.reply(append, cache_pb2.AppendResponse(results=[cache_pb2.AppendResult()]))
    assert worker.cache.next_call(list, 0.0) is None
    assert worker.cache.next_call_at(0.0) == BACKOFF_MOST_SECONDS
    again = worker.call(now=BACKOFF_MOST_SECONDS)
    assert isinstance(again.request, cache_pb2.ReportRequest)
    assert _blocks([again.request]) == [4, 5, 6]
    early = _Worker()
    early.cache.on_failure(early.call(), "RECOVERING", 0.0)
    assert early.cache.next_call(list, 0.0) is None
    assert early.cache.next_call(list, BACKOFF_MOST_SECONDS) is not None


def test_a_manager_that_does_not_answer_a_part_of_the_cache_is_away_for_all_calls() -> None:
    worker = _Worker()
    worker.until_live()
    worker.step(worker.sequence, 3)
    worker.cache.on_failure(worker.call(), "", 0.0)
    assert worker.cache.next_call(list, 0.0) is None
    assert worker.sequence.state is SequenceState.LIVE
