"""How long the manager delays the engine's steps, over real gRPC, against the time that vLLM's engine spends in its own manager.

python -m bench.engine_blocked [--runs N] [--json]

The reference trace (1,000 requests, 64 at a time, 512 shared + 64 own prompt tokens, 64 generated) through the real engine, cache
side and link, and a manager in another process. Only the model is replaced: a step sleeps 10 ms. The gap between two steps has the
engine's own work and the manager's cost: the cache side's records, the link's code on the same event loop, and waits for grants. A
control run, the same engine over a cache side with unlimited blocks and no manager, has only the engine's own work. The difference
is the engine's blocked time. vLLM's figure is the time of its KVCacheManager in process on the same trace, measured as in
bench.manager_core, in the same run. `make bench KIND=peers` installs it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from typing import Any, Final

import structlog

from bench.manager_core import record, replay
from bench.our_cluster import OurCluster
from bench.registration import register_request
from bench.replay import FINGERPRINT
from bench.report import Ratio, Series, command_line, facts, progress
from bench.trace import VOCAB_SIZE, Trace
from kvpool.worker_service.cache import events
from kvpool.worker_service.cache.engine_cache import Computed, EngineCache
from kvpool.worker_service.cache.groups.dense import DenseGroup
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from kvpool.worker_service.cache.settings import CacheSettings
from kvpool.worker_service.engine.engine import Engine
from kvpool.worker_service.engine.request import GenerationParams, Request
from kvpool.worker_service.engine.settings import EngineSettings
from kvpool.worker_service.manager_link import ManagerLink
from kvpool.worker_service.step import PartResult, SampledToken, Step

STEP_SECONDS: Final = 0.010


class _SleepingModel:
    """A step takes 10 ms and no CPU. Records when each step began and ended."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.ended: list[float] = []

    def execute(self, step: Step) -> list[PartResult]:
        self.began.append(time.perf_counter())
        results = [PartResult(None if part.sampling is None else SampledToken(7)) for part in step.parts]
        time.sleep(STEP_SECONDS)
        self.ended.append(time.perf_counter())
        return results

    def gaps(self) -> float:
        """Seconds between the end of a step and the start of the next, over all steps."""
        return sum(began - ended for ended, began in zip(self.ended, self.began[1:], strict=False))


class _EndlessCache(EngineCache):
    """The control: grants at once, has unlimited blocks, keeps no records and makes no calls."""

    candidates: Callable[[], List[CacheSequence]]
    is_ready = staticmethod(lambda: True)

    def extend(self, sequence: CacheSequence, num_slots: int) -> bool:
        return True

    def begin_step(self, sequences: Iterable[CacheSequence]) -> None:
        pass

    def end_step(self, results: Iterable[Computed], now: float, *, num_added_later: int = 0) -> None:
        for sequence, num_computed_tokens, token in results:
            sequence.num_computed_tokens = num_computed_tokens
            if token is not None:
                sequence.tokens.append(token)

    def free(self, sequence: CacheSequence) -> None:
        sequence.state = SequenceState.ENDED

    def take_events(self) -> list[events.Event]:
        granted: list[events.Event] = []
        for sequence in self.candidates():
            sequence.state = SequenceState.LIVE
            # As in the real run, where one request computes the shared prefix and the others wait for it.
            sequence.num_computed_tokens = 0 if not granted else 512
            granted.append(events.TableGranted(sequence))
        return granted


class _Run:
    """One pass of the trace through an engine."""

    def __init__(self, trace: Trace, cache: EngineCache) -> None:
        self._trace = trace
        self._tokens = trace.all_tokens()
        self.model = _SleepingModel()
        settings = EngineSettings(
            model_fingerprint=FINGERPRINT,
            vocab_size=VOCAB_SIZE,
            max_model_len=4096,
            max_num_seqs=trace.num_at_once,
            max_num_batched_tokens=trace.max_num_batched_tokens,
        )
        self.engine = Engine(settings, cache, self.model)
        if isinstance(cache, _EndlessCache):
            cache.candidates = self.engine.scheduler.candidates

    async def generate_all(self) -> None:
        """Run all requests, at most num_at_once at a time."""
        places = asyncio.Semaphore(self._trace.num_at_once)

        async def one(index: int) -> None:
            async with places:
                prompt = self._tokens[index][: self._trace.num_prompt]
                request = self.engine.submit(
                    GenerationParams(str(index), 1, prompt, max_tokens=self._trace.num_generated)
                )
                self.engine.on_cache_changed()
                await _drain(request)

        await asyncio.gather(*(one(index) for index in range(self._trace.num_requests)))


async def _drain(request: Request) -> None:
    while await request.stream.get() is not None:
        pass


async def _control(trace: Trace) -> float:
    """Seconds between steps without a manager."""
    run = _Run(trace, _EndlessCache(CacheSettings(block_size=trace.block_size, groups=(DenseGroup(trace.num_blocks),))))
    running = asyncio.create_task(run.engine.run())
    await run.generate_all()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return run.model.gaps()


async def _real(trace: Trace, address: str, number: int) -> tuple[float, int, int]:
    """Seconds between steps with a manager, steps, and decodes that waited for a call."""
    cache = EngineCache(CacheSettings(block_size=trace.block_size, groups=(DenseGroup(trace.num_blocks),)))
    run = _Run(trace, cache)
    is_open = asyncio.Event()
    introduction = register_request("bench", number, trace.block_size, trace.num_blocks)
    link = ManagerLink(address, introduction, run.engine, lambda ready: is_open.set() if ready else None)
    tasks = [asyncio.create_task(run.engine.run()), asyncio.create_task(link.run())]
    await is_open.wait()
    await run.generate_all()
    while not cache.is_idle:  # noqa: ASYNC110 (there is no event for it)
        await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return run.model.gaps(), run.engine.stats.num_steps, cache.num_reserve_waits


async def measure(runs: int) -> dict[str, Any]:
    """Interleaved: with the manager, and without."""
    trace = Trace()
    gaps, control, blocked = Series("between steps"), Series("the same without a manager"), Series("blocked")
    async with OurCluster(num_workers=0) as manager:
        for number in range(runs + 1):
            before = await manager.counts()
            with_manager, num_steps, num_waits = await _real(trace, manager.address, number + 1)
            rpcs = (await manager.counts()).since(before).rpcs
            without = await _control(trace)
            what = f"run {number} of {runs}" if number else "warm-up"
            progress(f"{what}: {with_manager * 1000:.0f} ms between steps, {without * 1000:.0f} ms without a manager")
            if number:
                gaps.seconds.append(with_manager)
                control.seconds.append(without)
                blocked.seconds.append(max(0.0, with_manager - without))
    progress("the peer's manager, in process")
    recording, _ = record(trace)
    peer = Series("vLLM KVCacheManager, in process", replay(recording, runs)["seconds"]["vllm"])
    return {
        "blocked": blocked,
        "gaps": gaps,
        "control": control,
        "peer": peer if peer.seconds else None,
        "ratio": Ratio(blocked, peer) if peer.seconds else None,
        "rpcs": dict(sorted(rpcs.items())),
        "steps": num_steps,
        "decodes_that_waited_for_a_call": num_waits,
        "facts": facts("grpcio", "vllm"),
    }


def show(result: dict[str, Any]) -> None:
    """Print the figures."""
    rpcs = result["rpcs"]
    print(f"\nThe engine's blocked time on the reference trace, {result['steps']} steps of 10 ms")
    print(f"  between steps            {result['gaps']}")
    print(f"  without a manager        {result['control']}")
    print(f"  blocked, the difference  {result['blocked']}")
    print(f"  vLLM's manager           {result['peer'] or 'not installed: make bench KIND=peers'}")
    if result["ratio"] is not None:
        print(
            f"  ratio                    {result['blocked'].median / result['peer'].median:.2f} of vLLM's, by the medians"
        )
    print(f"  RPCs of the last run     {sum(rpcs.values())}: {', '.join(f'{n} {kind}' for kind, n in rpcs.items())}")
    print(f"  decodes that waited      {result['decodes_that_waited_for_a_call']}")


def main() -> None:
    arguments = command_line(__doc__, runs=5).parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    result = asyncio.run(measure(arguments.runs))
    if arguments.json:
        print(json.dumps(result, default=lambda value: value.as_json()))
    else:
        show(result)


if __name__ == "__main__":
    main()
