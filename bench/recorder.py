"""Runs a trace through the worker's real scheduler and cache side and the real core, and records their calls.

There is no model: tokens are the trace's own, a step takes 10 ms and a call 1 ms of simulated time. Also measures the whole path of
a call without its socket: the worker's cache side, protobuf both ways, the manager's decoding, and the core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message

from bench.calls import RecordedCall, RecordedItem, Recording
from bench.replay import FINGERPRINT, registration
from bench.trace import Trace
from kvpool.cache_service import worker_codec
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import AppendItem, Granted, SequenceUpdate, Uplink, Wait
from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache.engine_cache import Computed, EngineCache
from kvpool.worker_service.cache.events import TableGranted
from kvpool.worker_service.cache.groups.dense import DenseGroup
from kvpool.worker_service.cache.link_state import MutatingCall
from kvpool.worker_service.cache.sequence import CacheSequence
from kvpool.worker_service.cache.settings import CacheSettings
from kvpool.worker_service.engine.request import GenerationParams, Request
from kvpool.worker_service.engine.scheduler import Scheduled, Scheduler
from kvpool.worker_service.engine.settings import EngineSettings
from kvpool.worker_service.step import SampledToken

STEP_SECONDS = 0.010
CALL_SECONDS = 0.001

Sent = TypeVar("Sent", bound=Message)
Result = TypeVar("Result")


class _TimedCache(EngineCache):
    """A cache side that sums the time spent in it, except in `extend`, which is too short to measure."""

    seconds = 0.0

    def free(self, sequence: CacheSequence) -> None:
        began = time.thread_time()
        super().free(sequence)
        self.seconds += time.thread_time() - began

    def timed(self, work: Callable[[], Result]) -> Result:
        """Run `work` and add its time."""
        began = time.thread_time()
        result = work()
        self.seconds += time.thread_time() - began
        return result


class Recorder:
    """One run of a trace. Use it once."""

    def __init__(self, trace: Trace) -> None:
        self.recording = Recording(trace)
        self._trace = trace
        self._tokens = trace.all_tokens()
        self._manager = CacheManager(1)
        session = self._manager.register(registration("bench", trace.block_size, trace.num_blocks), 0.0).session
        self._cache = _TimedCache(CacheSettings(block_size=trace.block_size, groups=(DenseGroup(trace.num_blocks),)))
        self._cache.on_registered(cache_pb2.RegisterResponse(session=session))
        settings = EngineSettings(
            "bench",
            vocab_size=0,
            max_model_len=0,
            max_num_seqs=trace.num_at_once,
            max_num_batched_tokens=trace.max_num_batched_tokens,
        )
        self._scheduler = Scheduler(self._cache, settings)
        self._num_arrived = 0
        self._num_ended = 0

    @property
    def seconds(self) -> float:
        """Time of the whole path of calls, without sockets."""
        return self._cache.seconds

    def run(self) -> None:
        """Run all steps, until the manager has acknowledged that all blocks are freed."""
        now = 0.0
        while self._num_ended < self._trace.num_requests or not self._cache.is_idle:
            self._arrive()
            self._take_events()
            batch = self._scheduler.schedule(now)
            self._cache.timed(partial(self._cache.begin_step, [part.sequence for part in batch]))
            self._talk(now, now + STEP_SECONDS)
            now += STEP_SECONDS
            if batch:
                self.recording.num_steps += 1
                self._end_step(batch, now)
        self.recording.num_reserve_waits = self._cache.num_reserve_waits
        self.recording.num_preemptions = self._scheduler.num_preemptions
        violations = self._manager.check().violations
        assert not violations, violations

    def _arrive(self) -> None:
        under_way = self._num_arrived - self._num_ended
        first = self._num_arrived
        for index in range(first, min(first + self._trace.may_arrive(under_way), self._trace.num_requests)):
            prompt = self._tokens[index][: self._trace.num_prompt]
            sequence = CacheSequence(
                str(index),
                1,
                common_pb2.Root(model_fingerprint=FINGERPRINT),
                prompt,
                max_new_tokens=self._trace.num_generated,
            )
            params = GenerationParams(str(index), 1, prompt, max_tokens=self._trace.num_generated)
            self._scheduler.add(Request(params, sequence, self._trace.num_generated, frozenset(), None))
            self._num_arrived += 1

    def _take_events(self) -> None:
        for event in self._cache.timed(self._cache.take_events):
            assert isinstance(event, TableGranted), event
            self._scheduler.on_granted(event.sequence)

    def _end_step(self, batch: list[Scheduled], now: float) -> None:
        sampled = [
            self._tokens[int(part.sequence.id.sequence_id)][len(part.sequence.tokens)] if part.samples else None
            for part in batch
        ]
        computed = [
            Computed(part.sequence, part.sequence.num_computed_tokens + part.num_tokens, token)
            for part, token in zip(batch, sampled, strict=True)
        ]
        self._cache.timed(partial(self._cache.end_step, computed, now))
        for part, token in zip(batch, sampled, strict=True):
            if token is None:
                continue
            part.request.take(SampledToken(token))
            if part.request.deliver(SampledToken(token)):
                self._num_ended += 1
                self._scheduler.remove(part.request)

    # -- the link, during the running step

    def _talk(self, now: float, until: float) -> None:
        candidates = self._scheduler.candidates
        while now < until:
            call = self._cache.timed(partial(self._cache.next_call, candidates, now))
            if call is None:
                at = self._cache.next_call_at(now)
                if at is None:
                    return
                now = max(at, now + CALL_SECONDS)
                continue
            now += CALL_SECONDS
            self._cache.timed(partial(self._exchange, call, now))

    def _exchange(self, call: MutatingCall, now: float) -> None:
        """The work of link and servicer, with bytes instead of a socket."""
        request = _over_the_wire(call.request)
        response: cache_pb2.AllocateResponse | cache_pb2.AppendResponse | cache_pb2.FreeResponse
        if isinstance(request, cache_pb2.AllocateRequest):
            response = self._allocate(request)
        elif isinstance(request, cache_pb2.AppendRequest):
            response = self._append(request)
        else:
            assert isinstance(request, cache_pb2.FreeRequest), "a trace without faults needs no report"
            response = self._free(request)
        self._cache.on_reply(call, _over_the_wire(response), now)

    def _allocate(self, request: cache_pb2.AllocateRequest) -> cache_pb2.AllocateResponse:
        uplink = worker_codec.decode_uplink(request)
        items = worker_codec.decode_batch(request.items, worker_codec.decode_allocate_item).items
        outcomes, reply = self._manager.allocate(uplink, items)
        response = cache_pb2.AllocateResponse(
            downlink=worker_codec.encode_downlink(reply), results=map(worker_codec.encode_allocate_outcome, outcomes)
        )
        for outcome in outcomes:
            self.recording.num_waits += isinstance(outcome, Wait)
            self.recording.num_cached_tokens += outcome.num_cached_tokens if isinstance(outcome, Granted) else 0
        recorded = [
            RecordedItem(
                int(item.key.sequence_id),
                item.key.round,
                0,
                len(item.tokens) // 4,
                max_new_tokens=item.max_new_tokens,
                no_wait=item.no_wait,
            )
            for item in items
        ]
        self._record("allocate", uplink, recorded)
        return response

    def _append(self, request: cache_pb2.AppendRequest) -> cache_pb2.AppendResponse:
        uplink = worker_codec.decode_uplink(request)
        items: list[AppendItem] = worker_codec.decode_batch(request.items, worker_codec.decode_append_item).items
        outcomes, reply = self._manager.append(uplink, items)
        response = cache_pb2.AppendResponse(
            downlink=worker_codec.encode_downlink(reply), results=map(worker_codec.encode_append_outcome, outcomes)
        )
        self._record("append", uplink, [_recorded(item.update) for item in items])
        return response

    def _free(self, request: cache_pb2.FreeRequest) -> cache_pb2.FreeResponse:
        uplink = worker_codec.decode_uplink(request)
        updates = worker_codec.decode_free_items(request.items)
        reply = self._manager.free(uplink, updates)
        response = cache_pb2.FreeResponse(downlink=worker_codec.encode_downlink(reply))
        self._record("free", uplink, [_recorded(update) for update in updates])
        return response

    def _record(self, kind: str, uplink: Uplink, items: list[RecordedItem]) -> None:
        self.recording.calls.append(
            RecordedCall(
                kind,
                uplink.call_no,
                uplink.downlink_ack,
                uplink.reserve_wishes[0] if uplink.reserve_wishes else None,
                tuple((block, generation) for returned in uplink.returned for block, generation in returned),
                tuple(items),
            )
        )


def _recorded(update: SequenceUpdate) -> RecordedItem:
    return RecordedItem(
        int(update.key.sequence_id),
        update.key.round,
        update.start,
        len(update.tokens) // 4,
        update.num_computed_tokens,
        tuple((index, block, generation) for entries in update.bound for index, block, generation in entries),
    )


def _over_the_wire(message: Sent) -> Sent:
    return type(message).FromString(message.SerializeToString())
