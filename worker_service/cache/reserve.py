"""The reserve: blocks granted to the worker ahead of need, so that decoding never waits for the manager."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_RISE = 0.1
"""Weight of the newest step in the rate if it is faster."""
_FALL_SECONDS = 5.0
"""A slower step has its duration's share of this as weight, at most _RISE."""


class SpareBlock(NamedTuple):
    """A granted block that is bound to no sequence."""

    block: int
    generation: int


class Reserve:
    """Spare blocks, oldest grant first, and surplus to return."""

    def __init__(self) -> None:
        self._spare: deque[SpareBlock] = deque()
        self.returning: list[SpareBlock] = []
        """Surplus, stated in every call until one is acknowledged."""

    def __len__(self) -> int:
        return len(self._spare)

    def spare(self) -> list[SpareBlock]:
        """The spare blocks, oldest grant first."""
        return list(self._spare)

    def add(self, block: int, generation: int) -> None:
        self._spare.append(SpareBlock(block, generation))

    def take(self) -> SpareBlock:
        """Remove the oldest spare block. The caller has checked that there is one."""
        return self._spare.popleft()

    def give_up(self, count: int) -> None:
        """Mark the newest `count` spare blocks as surplus."""
        for _ in range(count):
            self.returning.append(self._spare.pop())

    def returned(self, stated: tuple[SpareBlock, ...]) -> None:
        """A call that stated these as surplus was executed."""
        gone = set(stated)
        self.returning = [block for block in self.returning if block not in gone]


class DecodingRate:
    """Recent tokens per second, over all sequences.

    It rises within ten steps and falls over seconds: a few slow steps just before the manager goes away must not leave a reserve
    that lasts a fraction of the time it should.
    """

    def __init__(self) -> None:
        self.tokens_per_second = 0.0
        self._last_step_at: float | None = None

    def note(self, num_tokens: int, now: float) -> None:
        """A step has ended, and sampled `num_tokens`."""
        if self._last_step_at is not None and now > self._last_step_at:
            seconds = now - self._last_step_at
            more = num_tokens / seconds - self.tokens_per_second
            self.tokens_per_second += more * (_RISE if more > 0 else min(_RISE, seconds / _FALL_SECONDS))
        self._last_step_at = now


def spare_target(
    num_running: int, num_blocks_to_come: int, tokens_per_second: float, seconds: float, block_size: int
) -> int:
    """The number of spare blocks to hold: at least one per running sequence and enough for `seconds` of decoding at the present
    rate, but at most what the running sequences can still need; so 0 when idle."""
    ahead = -(-int(tokens_per_second * seconds) // block_size)
    return min(num_blocks_to_come, max(num_running, ahead))
