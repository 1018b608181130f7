"""What forks hold, and what they wait for: several answers to one prompt, and beams that fork in every step.

python -m bench.forks [--json]

The worker's cache side and the manager's core as they are, without a model: a step computes nothing. Blocks of 16, one group.

* Eight answers to a prompt of 1,000 tokens: blocks held once all have begun, and when each has 200 tokens.
* Four beams over 256 steps of 10 ms after a prompt of 1,000 tokens: in each step every beam is as likely as the others to be the
  parent of each of the next four; those that are nobody's parent end. A call is answered three steps after it was sent. Counted are
  steps that could not take place because a reserve was empty, which only a call can fill.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any, Final

from bench.report import command_line, facts
from kvpool.worker_service.cache.engine_cache import Computed
from kvpool.worker_service.cache.link_state import MutatingCall
from kvpool.worker_service.cache.sequence import CacheSequence
from tests.worker_service.windowed import Worker

BLOCK_SIZE: Final = 16
NUM_PROMPT: Final = 1000
STEP_SECONDS: Final = 0.01
LATENCY_STEPS: Final = 3


def answers(num_answers: int = 8, num_tokens: int = 200) -> dict[str, Any]:
    """Blocks that several answers to one prompt hold, at the worker and as the manager counts them."""
    worker = Worker((2000,), (0,), chunk=512)
    first = worker.sequence("first", range(NUM_PROMPT), num_tokens)
    first.num_forks_to_come = num_answers - 1
    worker.call(first)
    while first.num_computed_tokens < NUM_PROMPT:
        worker.step(first)
    forks = [worker.cache.fork(first, f"answer {number}") for number in range(1, num_answers)]
    sequences = [first, *(fork.sequence for fork in forks if fork is not None)]
    for sequence in sequences:
        worker.step(sequence)
    worker.call()
    at_first = worker.manager.sessions[0].counts()[0].held
    for _ in range(num_tokens - 2):
        for sequence in sequences:
            worker.step(sequence)
    worker.call()
    at_last = worker.manager.sessions[0].counts()[0].held
    worker.check()
    return {"answers": len(sequences), "prompts computed": 1, "held at first": at_first, "held at last": at_last}


class Beams:
    """A search that goes on whatever is under way between worker and manager."""

    def __init__(self, num_beams: int, num_steps: int) -> None:
        self.counts: Counter[str] = Counter()
        self.worker = Worker((2000,), (0,), chunk=512)
        first = self.worker.sequence("first", range(NUM_PROMPT), num_steps + 1)
        first.num_forks_to_come = num_beams - 1
        self.worker.call(first)
        while first.num_computed_tokens < NUM_PROMPT:
            self.worker.step(first)
        self.beams = [first]
        self._num_beams = num_beams
        self._draw = random.Random(1)
        self._sent: tuple[int, MutatingCall] | None = None
        self._number = 0
        self._is_computed = False
        """The last step has not been followed by a branching."""

    def step(self, number: int) -> None:
        """Fork, launch, talk to the manager while the step runs, and end it. Without blocks for a beam it waits."""
        worker = self.worker
        worker.now += STEP_SECONDS
        if self._is_computed:
            self._branch()
        lacking = [beam for beam in self.beams if not worker.cache.extend(beam, len(beam.tokens))]
        if not lacking:
            worker.cache.begin_step(self.beams)
            self._talk(number)
            tokens = [Computed(beam, len(beam.tokens), self._draw.randrange(1000)) for beam in self.beams]
            worker.cache.end_step(tokens, worker.now)
            self._is_computed = True
            self.counts["steps"] += 1
        else:
            self._talk(number)
            self.counts["waits"] += 1

    def _branch(self) -> None:
        """Choose the next beams: those that follow the same one have different last tokens."""
        chosen = Counter(self._draw.choices(range(len(self.beams)), k=self._num_beams))
        following: list[CacheSequence] = []
        for index, beam in enumerate(self.beams):
            if not chosen[index]:
                self.worker.cache.free(beam)
                continue
            following.append(beam)
            for token in range(1000, 999 + chosen[index]):
                self._number += 1
                forked = self.worker.cache.fork(beam, f"beam {self._number}", num_tokens=beam.num_computed_tokens)
                if forked is None:
                    self.counts["waits"] += 1
                    continue
                self.counts["forks"] += 1
                forked.sequence.tokens.append(token)
                following.append(forked.sequence)
        for index, beam in enumerate(following):
            # Which beams will be forked is open; how many forks there will be at most is not.
            beam.num_forks_to_come = 0 if index else self._num_beams - 1
        self.beams = following
        self._is_computed = False

    def _talk(self, number: int) -> None:
        cache = self.worker.cache
        if self._sent is not None and number >= self._sent[0] + LATENCY_STEPS:
            call, self._sent = self._sent[1], None
            cache.on_reply(call, self.worker.execute(call.request), self.worker.now)
        if self._sent is None:
            following = cache.next_call(list, self.worker.now)
            if following is not None:
                self._sent = number, following
                self.counts["calls"] += 1

    def finish(self) -> None:
        """All end, and every law holds."""
        if self._sent is not None:
            call = self._sent[1]
            self.worker.cache.on_reply(call, self.worker.execute(call.request), self.worker.now)
        for beam in self.beams:
            self.worker.cache.free(beam)
        self.worker.call()
        self.worker.check()
        assert self.worker.held() == (0,)


def beams(num_beams: int = 4, num_steps: int = 256) -> dict[str, Any]:
    """What a search has done, and how often it waited for a call."""
    search = Beams(num_beams, num_steps)
    most = 0
    for number in range(num_steps):
        search.step(number)
        most = max(most, search.worker.cache.num_used_blocks[0])
    search.finish()
    return {
        "beams": num_beams,
        **{name: search.counts[name] for name in ("steps", "forks", "calls", "waits")},
        "most held": most,
    }


def main() -> None:
    arguments = command_line(__doc__, runs=1).parse_args()
    several, search = answers(), beams()
    if arguments.json:
        print(json.dumps({"answers": several, "beams": search, "facts": facts()}))
        return
    whole, alone = NUM_PROMPT // BLOCK_SIZE, -(-NUM_PROMPT // BLOCK_SIZE)
    count = several["answers"]
    print(
        f"{count} answers: {several['held at first']} blocks held (the prompt's {whole} full ones and {count} tails; "
        f"{count * alone} without sharing), {several['held at last']} with 200 tokens each"
    )
    print(
        f"{search['beams']} beams: {search['forks']} forks in {search['steps']} steps, {search['calls']} calls to the manager, "
        f"{search['waits']} waited for; {search['most held']} blocks held at most"
    )


if __name__ == "__main__":
    main()
