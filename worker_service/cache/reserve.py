"""The reserve: blocks granted to the worker ahead of need, so that decoding never waits for the manager."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_RISE = 0.1
"""Weight of the newest step in the rate if it was a quick one."""
_FALL_SECONDS = 5.0
"""A slow step weighs as much as its share of this, at most _RISE."""


class ReservedBlock(NamedTuple):
    """A granted block that no sequence is bound to."""

    block: int
    generation: int


class Reserve:
    """Spare blocks, oldest grant first, and surplus on its way back."""

    def __init__(self) -> None:
        self._spare: deque[ReservedBlock] = deque()
        self.returning: list[ReservedBlock] = []
        """Given up here, stated in every call until one is acknowledged."""

    def __len__(self) -> int:
        return len(self._spare)

    def spare(self) -> list[ReservedBlock]:
        """The spare blocks, oldest grant first."""
        return list(self._spare)

    def add(self, block: int, generation: int) -> None:
        """Take in a granted block."""
        self._spare.append(ReservedBlock(block, generation))

    def take(self) -> ReservedBlock:
        """Bind the oldest spare block. The caller has checked that there is one."""
        return self._spare.popleft()

    def give_up(self, count: int) -> None:
        """Mark the newest `count` spare blocks as surplus."""
        for _ in range(count):
            self.returning.append(self._spare.pop())

    def returned(self, stated: tuple[ReservedBlock, ...]) -> None:
        """A call that stated these as surplus was executed."""
        gone = set(stated)
        self.returning = [block for block in self.returning if block not in gone]


class DecodingRate:
    """Tokens per second of late, over all sequences.

    It rises within some ten steps and falls over seconds: the manager may go away in any moment, and a few slow steps just
    before must not make the reserve last a fraction of what it should.
    """

    def __init__(self) -> None:
        self.tokens_per_second = 0.0
        self._last_step_at: float | None = None

    def note(self, num_tokens: int, now: float) -> None:
        """A step has ended that sampled so many tokens."""
        if self._last_step_at is not None and now > self._last_step_at:
            seconds = now - self._last_step_at
            more = num_tokens / seconds - self.tokens_per_second
            self.tokens_per_second += more * (_RISE if more > 0 else min(_RISE, seconds / _FALL_SECONDS))
        self._last_step_at = now


def spare_target(
    num_running: int, num_blocks_to_come: int, tokens_per_second: float, seconds: float, block_size: int
) -> int:
    """How many spare blocks the worker should hold: at least one per running sequence and enough for `seconds` of decoding at
    the present rate, but never more than the running sequences can still need; so 0 when idle."""
    ahead = -(-int(tokens_per_second * seconds) // block_size)
    return min(num_blocks_to_come, max(num_running, ahead))
