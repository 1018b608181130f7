"""One side of bench.before_after: reads names of cases from stdin, runs each, and prints the seconds that it took.

python bench/replay_side.py FOLDER, where FOLDER has the recordings. Its imports come from PYTHONPATH, possibly of an earlier
commit, so it uses only features of both commits.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.calls import Recording
from bench.replay import OurReplay
from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache import engine_cache
from kvpool.worker_service.cache.engine_cache import Computed, EngineCache
from kvpool.worker_service.cache.sequence import CacheSequence

CacheSettings = engine_cache.CacheSettings  # type: ignore[attr-defined]  # its own module has moved
BLOCK_SIZE: Final = 16
NUM_CACHED: Final = 512
NUM_PROMPT: Final = 576
NUM_ALLOCATES: Final = 1000
"""In one run of the case `hits`."""


def replay(path: Path) -> Callable[[], float]:
    """A recording through the manager's core."""
    ours = OurReplay(Recording.load(path))

    def run() -> float:
        seconds = ours.run()
        ours.check()
        return seconds

    return run


def hits() -> float:
    """A worker's cache side applies the reply to an Allocate of a prompt that is cached except for its end; the least seconds."""
    count = NUM_PROMPT // BLOCK_SIZE + 1
    cache = EngineCache(_settings(count))
    cache.on_registered(cache_pb2.RegisterResponse(session=1))
    tokens = list(range(1000, 1000 + NUM_PROMPT))
    _allocate(cache, tokens, 0, 1)
    return min(_allocate(cache, tokens, NUM_CACHED, number) for number in range(2, NUM_ALLOCATES))


def _settings(num_blocks: int) -> Any:
    try:
        from kvpool.worker_service.cache.groups.dense import DenseGroup
    except ImportError:  # an earlier commit
        return CacheSettings(block_size=BLOCK_SIZE, num_blocks=(num_blocks,))  # type: ignore[call-arg]
    return CacheSettings(block_size=BLOCK_SIZE, groups=(DenseGroup(num_blocks),))


def _allocate(cache: EngineCache, tokens: list[int], num_cached: int, number: int) -> float:
    """Allocate, compute and free a sequence; returns the seconds for the reply to the Allocate."""
    # A new message for each root, as for each request.
    root = common_pb2.Root(model_fingerprint="f" * 64)
    sequence = CacheSequence(str(number), 1, root, tokens, max_new_tokens=1)
    num_hits, num_blocks = num_cached // BLOCK_SIZE, len(tokens) // BLOCK_SIZE
    response = cache_pb2.AllocateResponse()
    granted = response.results.add().granted
    granted.num_cached_tokens = num_cached
    generations = [1] * num_hits + [number] * (num_blocks - num_hits)
    granted.tables.add(block_ids=range(1, num_blocks + 1), generations=generations)
    call = cache.next_call(lambda: [sequence], float(number))
    assert call is not None
    began = time.perf_counter()
    cache.on_reply(call, response, float(number))
    took = time.perf_counter() - began
    assert sequence.num_cached_tokens == num_cached
    cache.begin_step([sequence])
    cache.end_step([Computed(sequence, len(tokens), None)], float(number))
    cache.free(sequence)
    call = cache.next_call(list, float(number))
    assert call is not None
    cache.on_reply(call, cache_pb2.FreeResponse(), float(number))
    cache.take_events()
    return took


def main() -> None:
    folder = Path(sys.argv[1])
    cases = {"burst": replay(folder / "burst"), "steady": replay(folder / "steady"), "hits": hits}
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(cases[line.strip()](), flush=True)


if __name__ == "__main__":
    main()
