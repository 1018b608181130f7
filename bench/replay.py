"""The two managers on one trace, in one process: their inputs are prepared, their work is timed.

The time is CPU time of the thread, which other programs disturb least. Runs in the peer's environment, where kvpool's core needs
only xxhash.
"""

from __future__ import annotations

import gc
import time
from array import array
from typing import Any

from bench.calls import RecordedCall, RecordedItem, Recording
from bench.trace import Trace
from kvpool.cache_service.core.groups.dense import DenseSpec
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    AppendItem,
    Layout,
    Registration,
    ReservedBlock,
    Root,
    SequenceKey,
    SequenceUpdate,
    TableEntry,
    Uplink,
)

FINGERPRINT = "bench"
"""Model fingerprint; the workers of benchmarks have no model."""


def registration(worker_id: str, block_size: int, num_blocks: int, num_groups: int = 1) -> Registration:
    """A worker's registration at the core; its groups have `num_blocks` each."""
    layout = Layout(block_size, (DenseSpec(num_blocks),) * num_groups)
    return Registration(worker_id, 1, 1, "127.0.0.1:1", "bench", FINGERPRINT, layout)


class OurReplay:
    """kvpool's core executes the recorded calls. The time includes building its messages from token lists and block ids."""

    def __init__(self, recording: Recording, num_events: int = 0, num_groups: int = 1) -> None:
        """`num_events`: that a journal of contents keeps; 0: nobody follows them. `num_groups`: of the worker; each gets what was
        recorded of one, since pools of one size grant the same blocks."""
        self._trace = trace = recording.trace
        self._recording = recording
        self._num_events = num_events
        self._num_groups = num_groups
        self._tokens = trace.all_tokens()
        self._root = Root(FINGERPRINT)
        self.manager = CacheManager(1)
        self._session = 0

    def run(self) -> float:
        """Replay all calls on an empty manager; returns the seconds they took."""
        self.manager = manager = CacheManager(1)
        self._session = manager.register(
            registration("bench", self._trace.block_size, self._trace.num_blocks, self._num_groups), 0.0
        ).session
        calls = self._recording.calls
        if self._num_events:
            while manager.follow_contents(self._num_events).list_some(self._trace.num_blocks):
                pass
        gc.collect()
        began = time.thread_time()
        for call in calls:
            uplink = self._uplink(call)
            if call.kind == "allocate":
                manager.allocate(uplink, [self._allocate_item(item) for item in call.items])
            elif call.kind == "append":
                manager.append(uplink, [AppendItem(self._update(item)) for item in call.items])
            else:
                manager.free(uplink, [self._update(item) for item in call.items])
        return time.thread_time() - began

    def check(self) -> None:
        """Assert that the replay has the results of the recording, and that all laws hold."""
        (session,) = self.manager.sessions
        assert session.num_cached_tokens == self._recording.num_cached_tokens
        assert session.num_calls == len(self._recording.calls)
        assert not session.sequences
        violations = self.manager.check().violations
        assert not violations, violations

    def _uplink(self, call: RecordedCall) -> Uplink:
        returned = tuple([ReservedBlock(block, generation) for block, generation in call.returned])
        wishes = (call.reserve_wish,) * self._num_groups
        return Uplink(
            self._session, call.call_no, call.downlink_ack * self._num_groups, wishes, (returned,) * self._num_groups
        )

    def _allocate_item(self, item: RecordedItem) -> AllocateItem:
        tokens = array("I", self._tokens[item.request][: item.num_tokens]).tobytes()
        key = SequenceKey(str(item.request), 1, item.round)
        return AllocateItem(key, self._root, tokens, item.max_new_tokens, item.no_wait)

    def _update(self, item: RecordedItem) -> SequenceUpdate:
        start = item.start
        bound = tuple([TableEntry(index, block, generation) for index, block, generation in item.bound])
        return SequenceUpdate(
            SequenceKey(str(item.request), 1, item.round),
            start,
            array("I", self._tokens[item.request][start : start + item.num_tokens]).tobytes(),
            item.num_computed,
            (bound,) * self._num_groups if bound else (),
        )


class VllmReplay:
    """vLLM's KVCacheManager with the calls of vLLM's scheduler: a look-up and an allocation per admission, an allocation per
    sequence and step, the hashing of prompts and of generated blocks, a free at the end.

    Requests are prepared; their scheduling, sampling and statistics are left out.
    """

    def __init__(self, trace: Trace) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request, RequestStatus

        self._trace = trace
        self._tokens = trace.all_tokens()
        self.num_cached_tokens = 0
        self.num_steps = 0
        self._running_status = RequestStatus.RUNNING
        hash_function = get_hash_fn_by_name("sha256")  # vLLM's default
        kv_cache_utils.init_none_hash(hash_function)
        hasher = kv_cache_utils.get_request_block_hasher(trace.block_size, hash_function)
        spec = FullAttentionSpec(block_size=trace.block_size, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
        config = KVCacheConfig(
            num_blocks=trace.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )

        def new_manager() -> Any:
            return KVCacheManager(
                config,
                max_model_len=8192,
                scheduler_block_size=trace.block_size,
                hash_block_size=trace.block_size,
                max_in_flight_tokens=trace.max_num_batched_tokens,
            )

        def new_requests() -> list[Any]:
            params = SamplingParams(max_tokens=trace.num_generated)
            requests = [
                Request(str(index), tokens[: trace.num_prompt], params, None)
                for index, tokens in enumerate(self._tokens)
            ]
            for request in requests:
                # Set now, so that the first hashes are computed within the measured time, as on arrival.
                request._block_hasher = hasher
            return requests

        self._new_manager = new_manager
        self._new_requests = new_requests

    def run(self) -> float:
        """The whole trace on an empty manager; returns the seconds it took."""
        trace, manager = self._trace, self._new_manager()
        arriving = self._new_requests()
        arriving.reverse()
        tokens = self._tokens
        waiting: list[Any] = []
        running: list[Any] = []
        num_arrived = num_ended = num_cached = num_steps = 0
        gc.collect()
        began = time.thread_time()
        while num_ended < trace.num_requests:
            for _ in range(min(trace.may_arrive(num_arrived - num_ended), len(arriving))):
                request = arriving.pop()
                request.update_block_hashes()
                waiting.append(request)
                num_arrived += 1
            manager.new_step_starts()
            budget = trace.max_num_batched_tokens
            scheduled: list[tuple[Any, int]] = []
            for request in running:
                count = min(request.num_tokens - request.num_computed_tokens, budget)
                if not count:
                    continue
                blocks = manager.allocate_slots(request, count)
                if blocks is None:
                    raise RuntimeError("the pool is too small for the trace: preemption is not part of it")
                blocks.get_block_ids(allow_none=True)
                scheduled.append((request, count))
                budget -= count
            while waiting and budget:
                request = waiting[0]
                computed, num_computed, _ = manager.get_computed_blocks(request)
                count = min(request.num_tokens - num_computed, budget)
                blocks = manager.allocate_slots(
                    request,
                    count,
                    num_new_computed_tokens=num_computed,
                    new_computed_blocks=computed,
                    full_sequence_must_fit=True,
                    has_scheduled_reqs=bool(running),
                )
                if blocks is None:
                    break
                manager.get_blocks(request.request_id).get_block_ids()
                waiting.pop(0)
                request.status = self._running_status
                request.num_computed_tokens = num_computed
                num_cached += num_computed
                running.append(request)
                scheduled.append((request, count))
                budget -= count
            manager.take_new_block_ids()
            num_steps += 1
            ended: set[str] = set()
            for request, count in scheduled:
                request.num_computed_tokens += count
                if request.num_computed_tokens < request.num_tokens:
                    continue
                request.append_output_token_ids(tokens[int(request.request_id)][request.num_tokens])
                if request.num_output_tokens == trace.num_generated:
                    manager.free(request)
                    ended.add(request.request_id)
            if ended:
                running = [request for request in running if request.request_id not in ended]
                num_ended += len(ended)
        seconds = time.thread_time() - began
        self.num_cached_tokens, self.num_steps = num_cached, num_steps
        return seconds
