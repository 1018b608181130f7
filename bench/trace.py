"""The reference trace: many requests with a long shared prefix, a bounded number of them at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCAB_SIZE = 49_152


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests, and the engine's limits. The defaults are the reference trace."""

    num_requests: int = 1000
    num_at_once: int = 64
    """Concurrent requests; the next one arrives when one ends."""
    num_shared: int = 512
    """Prompt tokens that all requests begin with."""
    num_own: int = 64
    """Prompt tokens of each request after these."""
    num_generated: int = 64
    block_size: int = 16
    num_blocks: int = 4096
    """Of the pool: about half of the blocks that the trace fills, so that cached blocks are evicted."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step."""
    num_arrivals_per_step: int | None = None
    """None: the first requests arrive at once and stay almost in step; n: n per step until num_at_once are running."""

    @property
    def num_prompt(self) -> int:
        """Tokens of each prompt."""
        return self.num_shared + self.num_own

    def all_tokens(self) -> list[list[int]]:
        """The prompt and the generated tokens of each request. The same on every call."""
        draw = random.Random(2026)
        shared = draw.choices(range(VOCAB_SIZE), k=self.num_shared)
        return [
            shared + draw.choices(range(VOCAB_SIZE), k=self.num_own + self.num_generated)
            for _ in range(self.num_requests)
        ]

    def may_arrive(self, num_under_way: int) -> int:
        """Number of requests that may arrive before a step."""
        room = self.num_at_once - num_under_way
        return room if self.num_arrivals_per_step is None else min(room, self.num_arrivals_per_step)
