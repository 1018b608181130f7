"""What Explain costs the manager's core: remembering evictions on each allocation, and an answer.

python -m bench.explain [--runs N] [--json]

`allocate`: requests of 32 new blocks that evict 32, and their Free, in CPU time per request; in turn without a memory and with one
of 65,536 names, each in a manager of its own in this process. `explain`: an answer for a prompt of 8,192 tokens of which half is
cached, and one whose first missing block has 10,000 siblings; that one also with the bounds of an answer that comes with Route.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Final

from bench.report import Series, command_line
from kvpool.cache_service.core.closest_prompt import BRIEF, THOROUGH
from kvpool.cache_service.core.groups.dense import DenseSpec
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    Layout,
    Registration,
    Root,
    SequenceKey,
    SequenceUpdate,
    Uplink,
)

BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 20_000
BLOCKS_PER_REQUEST: Final = 32
NUM_REQUESTS: Final = 2_000
NAMES: Final = 1 << 16
ROOT: Final = Root("model")


class Office:
    """A manager with one worker, whose requests come one after the other."""

    def __init__(self, num_names: int, num_blocks: int = NUM_BLOCKS) -> None:
        self.manager = CacheManager(1, explain_evictions=num_names)
        introduction = Registration(
            "worker", 1, 1, "worker:1", "model", "model", Layout(BLOCK_SIZE, (DenseSpec(num_blocks),))
        )
        self._session = self.manager.register(introduction, 0.0).session
        self._calls = itertools.count(1)

    def serve(self, number: int, tokens: bytes) -> None:
        """One request: granted, computed, freed."""
        key = SequenceKey(f"request-{number}", 1, 0)
        self.manager.allocate(Uplink(self._session, next(self._calls)), [AllocateItem(key, ROOT, tokens, no_wait=True)])
        update = SequenceUpdate(key, 0, b"", len(tokens) // 4, ())
        self.manager.free(Uplink(self._session, next(self._calls)), [update])


def new_prompt(number: int, num_tokens: int = BLOCK_SIZE * BLOCKS_PER_REQUEST) -> bytes:
    """A prompt that shares no block with that of another number."""
    return (number.to_bytes(4, "little") + bytes(4 * (BLOCK_SIZE - 1))) * (num_tokens // BLOCK_SIZE)


def time_requests(office: Office, numbers: range) -> float:
    """CPU seconds per request."""
    prompts = [new_prompt(number) for number in numbers]
    begin = time.thread_time()
    for number, prompt in zip(numbers, prompts, strict=True):
        office.serve(number, prompt)
    return (time.thread_time() - begin) / len(numbers)


def measure_allocation(runs: int) -> tuple[Series, Series]:
    """Without and with a memory, in turn; all requests evict."""
    without, with_memory = Series("without a memory"), Series(f"with {NAMES:,} names")
    offices = ((Office(0), without), (Office(NAMES), with_memory))
    first = 1
    for run in range(-1, runs):
        numbers = range(first, first + NUM_REQUESTS)
        first += NUM_REQUESTS
        for office, series in offices if run % 2 else reversed(offices):
            seconds = time_requests(office, numbers)
            if run >= 0:
                series.seconds.append(seconds)
    return without, with_memory


def measure_answers(runs: int) -> tuple[Series, Series, Series]:
    """The answers, in CPU time."""
    half, siblings = Series("8,192 tokens, half cached"), Series("10,000 siblings")
    brief = Series("10,000 siblings, in a Route")
    office = Office(NAMES)
    office.serve(0, new_prompt(1, 4096))
    asked = new_prompt(1, 4096) + new_prompt(2, 4096)
    wide = Office(NAMES, num_blocks=50_000)
    beginning = new_prompt(1, BLOCK_SIZE)
    for number in range(10_000):
        wide.serve(number, beginning + new_prompt(number + 2, 2 * BLOCK_SIZE))
    for series, manager, tokens, bounds in (
        (half, office.manager, asked, THOROUGH),
        (siblings, wide.manager, beginning + new_prompt(1, 64), THOROUGH),
        (brief, wide.manager, beginning + new_prompt(1, 64), BRIEF),
    ):
        for _ in range(runs * 10):
            begin = time.thread_time()
            manager.explain(ROOT, tokens, bounds=bounds)
            series.seconds.append(time.thread_time() - begin)
    return half, siblings, brief


def main() -> None:
    arguments = command_line(__doc__, runs=9).parse_args()
    without, with_memory = measure_allocation(arguments.runs)
    answers = measure_answers(arguments.runs)
    ratio_of_least = min(with_memory.seconds) / min(without.seconds)
    if arguments.json:
        found = {"allocate": [without, with_memory], "ratio_of_least": ratio_of_least, "explain": answers}
        print(json.dumps(found, default=lambda value: value.as_json()))
        return
    print(
        f"allocate {BLOCKS_PER_REQUEST} blocks, which evicts {BLOCKS_PER_REQUEST}, and free them; CPU time per request"
    )
    for series in (without, with_memory):
        print(f"  {series.name:<28}{_micro(series)}")
    print(f"  medians {with_memory.median / without.median:.3f}, least over least {ratio_of_least:.3f}")
    print("explain; CPU time per answer")
    for series in answers:
        print(f"  {series.name:<28}{_micro(series)}")


def _micro(series: Series) -> str:
    least, largest = min(series.seconds) * 1e6, max(series.seconds) * 1e6
    return f"{series.median * 1e6:.1f} µs ({least:.1f} to {largest:.1f}, {len(series.seconds)} runs)"


if __name__ == "__main__":
    main()
