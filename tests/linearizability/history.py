"""What was asked of the manager and what it answered, with the order in which questions left and answers came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from google.rpc import status_pb2

from kvpool.cache_service.core.messages import (
    Appended,
    BlockCounts,
    Boundary,
    Grant,
    Granted,
    GrantedTable,
    SequenceKey,
    Stop,
    TableEntry,
    Wait,
)
from kvpool.protocol.status import read_details
from kvpool.v1 import cache_pb2, common_pb2


class Refused(NamedTuple):
    """A call or an item that was turned down."""

    reason: str
    position: int | None = None


class Told(NamedTuple):
    """The answer to a call on the link: what became of each item, the downlink, and the pool as it is."""

    outcomes: tuple[Granted | Wait | Appended | Refused, ...]
    entries: tuple[tuple[int, Grant | Stop | Boundary], ...]
    counts: tuple[BlockCounts, ...]


class Registered(NamedTuple):
    session: int
    report_wanted: bool


class Routed(NamedTuple):
    """The answer to Route: worker, cached tokens, tokens cached or in flight; by worker, because the ranking is not the model's."""

    workers: tuple[tuple[str, int, int], ...]


class Done(NamedTuple):
    """The answer to Deregister, which has nothing to say."""


class Unknown(NamedTuple):
    """No answer came: the call may have been executed at any time after it was sent, or never."""


Answer = Told | Registered | Routed | Done | Refused | Unknown

NEVER = 1 << 62
"""When an answer came that never did."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call as it reached the manager. Moments are numbers of events on the proxy's one event loop, so their order is exact."""

    number: int
    method: str
    request: Any
    sent: int
    answered: int
    answer: Answer

    def __str__(self) -> str:
        uplink = getattr(self.request, "uplink", None)
        call = f" call {uplink.call_no} of {uplink.session & 0xFFFFFFFF}" if uplink is not None else ""
        until = "never" if self.answered == NEVER else self.answered
        return f"#{self.number} {self.method}{call} [{self.sent}, {until}] → {self.answer}"


def failure(status: status_pb2.Status) -> Refused:
    details = read_details(status)
    return Refused(details.reason, details.number("position"))


def answer_of(method: str, response: Any) -> Answer:
    if method == "Register":
        return Registered(response.session, response.report_wanted)
    if method == "Deregister":
        return Done()
    if method == "Route":
        return Routed(
            tuple(sorted((one.worker_id, one.num_cached_tokens, one.num_in_flight_tokens) for one in response.workers))
        )
    outcomes: tuple[Any, ...] = ()
    if method == "Allocate":
        outcomes = tuple(map(_allocated, response.results))
    elif method == "Append":
        outcomes = tuple(map(_appended, response.results))
    return Told(
        outcomes,
        tuple((entry.number, _entry(entry)) for entry in response.downlink.entries),
        tuple(BlockCounts(*(getattr(one, name) for name in BlockCounts._fields)) for one in response.downlink.counts),
    )


def _allocated(result: cache_pb2.AllocateResult) -> Granted | Wait | Refused:
    if result.status.code:
        return failure(result.status)
    if result.HasField("wait"):
        return Wait(_key(result.wait.leader), result.wait.position)
    tables = [GrantedTable(tuple(run.block_ids), tuple(run.generations)) for run in result.granted.tables]
    return Granted(tuple(tables), result.granted.num_cached_tokens)


def _appended(result: cache_pb2.AppendResult) -> Appended | Refused:
    if result.status.code:
        return failure(result.status)
    entries = tuple(
        TableEntry(run.start_index + place, block, generation)
        for run in result.tables
        for place, (block, generation) in enumerate(zip(run.block_ids, run.generations, strict=True))
    )
    return Appended(result.num_sealed_tokens, (entries,) if entries else ())


def _entry(entry: cache_pb2.DownlinkEntry) -> Grant | Stop:
    if entry.HasField("stop"):
        return Stop(_key(entry.stop))
    assert entry.HasField("grant"), entry
    (generation,) = set(entry.grant.generations)
    return Grant(tuple(entry.grant.block_ids), generation)


def _key(key: common_pb2.SequenceKey) -> SequenceKey:
    return SequenceKey(key.sequence_id, key.attempt, key.round)
