"""Workers without a model: engine, cache side and link are the real ones, over real gRPC; a step sleeps and computes nothing.

`python -m bench.simulated_workers MANAGERS FIRST COUNT NUM_BLOCKS STEP_SECONDS` runs workers FIRST … FIRST + COUNT − 1 in one
process and takes commands on stdin, one JSON list a line; see `_Process`. Each is answered with one line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from bench.replay import FINGERPRINT
from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache.engine_cache import EngineCache
from kvpool.worker_service.cache.groups.dense import DenseGroup
from kvpool.worker_service.cache.settings import CacheSettings
from kvpool.worker_service.engine.engine import Engine
from kvpool.worker_service.engine.request import GenerationParams, Request
from kvpool.worker_service.engine.settings import EngineSettings
from kvpool.worker_service.manager_link import ManagerLink
from kvpool.worker_service.step import PartResult, SampledToken, SamplingParams, Step

BLOCK_SIZE: Final = 16
_VOCAB_SIZE: Final = 256
_SAMPLED: Final = PartResult(SampledToken(7))


class _SleepingModel:
    """A StepRunner whose steps take that long."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds

    def execute(self, step: Step) -> list[PartResult]:
        time.sleep(self._step_seconds)
        return [_SAMPLED if part.sampling is not None else PartResult() for part in step.parts]


@dataclass
class Stream:
    """A request that runs, and when its tokens came."""

    request: Request
    last_at: float = 0.0
    longest_gap: float = 0.0
    first_after: float = 0.0
    """The first token after `mark` whose worker had a new session by then."""
    num_tokens: int = 0


@dataclass
class SimulatedWorker:
    """One worker, registered as long as `run` runs."""

    manager: str
    worker_id: str
    num_blocks: int
    step_seconds: float
    max_num_seqs: int = 256
    streams: list[Stream] = field(default_factory=list)
    served_at: float = 0.0
    """When a session last began to work."""
    complete_at: float = 0.0
    """When its report was complete."""

    def __post_init__(self) -> None:
        self.cache = EngineCache(CacheSettings(block_size=BLOCK_SIZE, groups=(DenseGroup(self.num_blocks),)))
        settings = EngineSettings(
            model_fingerprint=FINGERPRINT,
            vocab_size=_VOCAB_SIZE,
            max_model_len=1 << 20,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=1 << 18,
            max_mixed_prefill_tokens=1 << 18,
            max_num_waiting=1 << 16,
            max_num_waiting_tokens=1 << 30,
        )
        self.engine = Engine(settings, self.cache, _SleepingModel(self.step_seconds))
        config = common_pb2.KVCacheConfig(block_size=BLOCK_SIZE)
        config.groups.add(group=0).full_attention.SetInParent()
        config.pools.add(group=0, tier=common_pb2.TIER_DEVICE, num_blocks=self.num_blocks)
        introduction = cache_pb2.RegisterRequest(
            worker_id=self.worker_id,
            incarnation=time.time_ns(),
            process_key=self.worker_id.encode().ljust(16, b"-"),
            address="127.0.0.1:1",
            model_name="simulated",
            model_fingerprint=FINGERPRINT,
            kv_cache_config=config,
        )
        self.link = ManagerLink(self.manager, introduction, self.engine, self._on_session)

    def _on_session(self, works: bool) -> None:
        if works:
            self.served_at = time.monotonic()

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(self.engine.run(), self.link.run(), self._watch())

    async def _watch(self) -> None:
        """Note when a report is complete."""
        was_reporting = False
        while True:
            link = self.cache.state.link
            is_reporting = link is None or link.report is not None
            if was_reporting and not is_reporting:
                self.complete_at = time.monotonic()
            was_reporting = is_reporting
            await asyncio.sleep(0.02)

    async def generate(self, name: str, prompt: Sequence[int], max_tokens: int) -> Stream:
        """Run one request to its end."""
        stream = Stream(self._submit(name, prompt, max_tokens))
        await self.read(stream)
        return stream

    def begin(self, name: str, prompt: Sequence[int], max_tokens: int) -> Stream:
        """Start one request, which `read` reads."""
        stream = Stream(self._submit(name, prompt, max_tokens))
        self.streams.append(stream)
        return stream

    def _submit(self, name: str, prompt: Sequence[int], max_tokens: int) -> Request:
        params = GenerationParams(
            name, 1, list(prompt), max_tokens=max_tokens, ignore_eos=True, sampling=SamplingParams()
        )
        return self.engine.submit(params)

    async def read(self, stream: Stream) -> None:
        """To its end."""
        while (chunk := await stream.request.stream.get()) is not None:
            now = time.monotonic()
            if stream.num_tokens:
                stream.longest_gap = max(stream.longest_gap, now - stream.last_at)
            stream.last_at = now
            stream.num_tokens += len(chunk.tokens)
            if not stream.first_after and self.served_at:
                stream.first_after = now


class _Process:
    """The commands."""

    def __init__(self, workers: list[SimulatedWorker]) -> None:
        self._workers = workers
        self._reading: list[asyncio.Task[None]] = []

    async def registered(self) -> bool:
        """Wait until all workers are registered."""
        await _until(lambda: all(worker.served_at for worker in self._workers))
        return True

    async def fill(self, num_sequences: int, num_tokens: int) -> bool:
        """So many requests of each worker, to their end: their blocks stay as cache."""
        await asyncio.gather(
            *(
                worker.generate(f"{worker.worker_id} done {index}", _prompt(worker, index, num_tokens), 1)
                for worker in self._workers
                for index in range(num_sequences)
            )
        )
        return True

    async def begin(self, num_sequences: int, num_tokens: int, max_tokens: int) -> bool:
        """So many requests of each worker. Waits until all have a token."""
        for worker in self._workers:
            for index in range(num_sequences):
                prompt = _prompt(worker, num_sequences + index, num_tokens)
                stream = worker.begin(f"{worker.worker_id} {index}", prompt, max_tokens)
                self._reading.append(asyncio.create_task(worker.read(stream)))
        await _until(lambda: all(stream.num_tokens > 1 for worker in self._workers for stream in worker.streams))
        return True

    async def mark(self) -> bool:
        """Gaps and sessions count from now on."""
        for worker in self._workers:
            worker.served_at = worker.complete_at = 0.0
            for stream in worker.streams:
                stream.longest_gap = stream.first_after = 0.0
        return True

    async def result(self) -> dict[str, Any]:
        """What has happened since: moments of the clock that all processes share, and seconds."""
        streams = [stream for worker in self._workers for stream in worker.streams]
        return {
            "served_at": [worker.served_at for worker in self._workers],
            "complete_at": [worker.complete_at for worker in self._workers],
            "first_after": [stream.first_after for stream in streams],
            "gaps": [stream.longest_gap for stream in streams],
            "used": [worker.cache.num_used_blocks[0] for worker in self._workers],
            "cpu": time.process_time(),
        }


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - many things make it true
        await asyncio.sleep(0.05)


def _prompt(worker: SimulatedWorker, index: int, num_tokens: int) -> list[int]:
    """Of its own worker and index, so that nothing is shared."""
    rng = random.Random(f"{worker.worker_id} {index}")
    return [rng.randrange(_VOCAB_SIZE) for _ in range(BLOCK_SIZE)] + [1] * (num_tokens - BLOCK_SIZE)


async def _serve(manager: str, first: int, count: int, num_blocks: int, step_seconds: float) -> None:
    workers = [SimulatedWorker(manager, f"w{first + index}", num_blocks, step_seconds) for index in range(count)]
    process = _Process(workers)
    running = [asyncio.create_task(worker.run()) for worker in workers]
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, *arguments = json.loads(line)
        print(json.dumps(await getattr(process, name)(*arguments)), flush=True)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    manager, *numbers, step_seconds = sys.argv[1:]
    first, count, num_blocks = map(int, numbers)
    asyncio.run(_serve(manager, first, count, num_blocks, float(step_seconds)))


if __name__ == "__main__":
    main()
