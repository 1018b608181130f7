"""How much of a shared beginning requests find on a model with recurrent layers.

python -m bench.states [--json]

The worker's cache side and the manager's core as they are, without a model: a step computes nothing. Blocks have 16 tokens, the
grid 64. Four requests begin with the same 1,500 tokens, as chats with one system prompt do, and go on with 200 of their own; each
generates 20. Found at most: 1,472 tokens, the last place of the grid.

* One after the other, and the client says where the system prompt ends, as it does for chats by itself.
* One after the other, and nobody says so.
* Together: all are there before the first has computed anything.
"""

from __future__ import annotations

import json
import random
from typing import Final

from bench.report import command_line, facts
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from tests.worker_service.windowed import Worker

NUM_REQUESTS: Final = 4
NUM_SHARED: Final = 1500
NUM_OWN: Final = 200
NUM_NEW: Final = 20
GRID: Final = 64


def _worker() -> Worker:
    return Worker((2000, 40), (), chunk=512, grid=GRID)


def _requests(worker: Worker, boundaries: tuple[int, ...] = ()) -> list[CacheSequence]:
    draw = random.Random(1)
    shared = [draw.randrange(50_000) for _ in range(NUM_SHARED)]
    prompts = [shared + [draw.randrange(50_000) for _ in range(NUM_OWN)] for _ in range(NUM_REQUESTS)]
    return [worker.sequence(f"request {i}", prompt, NUM_NEW, boundaries) for i, prompt in enumerate(prompts)]


def _finish(worker: Worker, sequence: CacheSequence) -> None:
    while len(sequence.tokens) < sequence.max_tokens:
        worker.step(sequence)
    worker.end(sequence)


def in_turns(boundaries: tuple[int, ...] = ()) -> list[int]:
    """Tokens that each request finds."""
    worker = _worker()
    found = []
    for sequence in _requests(worker, boundaries):
        worker.call(sequence)
        found.append(sequence.num_cached_tokens)
        _finish(worker, sequence)
    worker.check()
    return found


def together() -> list[int]:
    """The same if all come at once; a step computes a chunk of each that can run."""
    worker = _worker()
    sequences = _requests(worker)
    found: dict[str, int] = {}
    while len(found) < NUM_REQUESTS or any(s.state is not SequenceState.ENDED for s in sequences):
        worker.call(*sequences)
        for sequence in [one for one in sequences if one.state is SequenceState.LIVE]:
            found.setdefault(sequence.id.sequence_id, sequence.num_cached_tokens)
            worker.step(sequence)
            if len(sequence.tokens) == sequence.max_tokens:
                worker.end(sequence)
    worker.check()
    return [found[sequence.id.sequence_id] for sequence in sequences]


def main() -> None:
    arguments = command_line(__doc__, runs=1).parse_args()
    cases = {
        "in turns, the client says where the system prompt ends": in_turns((NUM_SHARED,)),
        "in turns": in_turns(),
        "together": together(),
    }
    if arguments.json:
        print(json.dumps({"found": cases, "facts": facts()}))
        return
    print(f"of {NUM_SHARED:,} shared tokens, {NUM_SHARED // GRID * GRID:,} of them up to the grid, found by request:")
    for name, found in cases.items():
        print(f"{name + ':':56} {'  '.join(f'{count:5,}' for count in found)}")


if __name__ == "__main__":
    main()
