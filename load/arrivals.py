"""Decides when conversations begin: as soon as a user is free (closed loop), or at times of their own (open loop)."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from kvpool.client.errors import InvalidRequest

from .workload import Conversation

MAX_IN_FLIGHT: Final = 4096
"""Most conversations at the same time, in either loop."""
DEFAULT_MAX_IN_FLIGHT: Final = 256
"""Default of an open loop."""

Converse: TypeAlias = Callable[[Conversation, float], Awaitable[None]]
"""Has a conversation to its end. The second argument is the time at which it was due, on the clock of the sender."""
Sleep: TypeAlias = Callable[[float], Awaitable[None]]


class Pattern(StrEnum):
    """Distances between arrivals in an open loop."""

    POISSON = "poisson"
    """Exponentially distributed, as with many independent users."""
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Users who begin their next conversation when the last one has ended: a slow engine gets fewer requests."""

    num_users: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_users <= MAX_IN_FLIGHT:
            raise InvalidRequest(f"users must be 1 to {MAX_IN_FLIGHT}, got {self.num_users}", reason="BAD_FIELD")

    async def send(
        self, conversations: Sequence[Conversation], converse: Converse, clock: Callable[[], float], sleep: Sleep
    ) -> None:
        """Have all conversations. An error of one ends the others, and is raised in an ExceptionGroup."""
        waiting = iter(conversations)

        async def be_a_user() -> None:
            for conversation in waiting:
                await converse(conversation, clock())

        async with asyncio.TaskGroup() as users:
            for _ in range(min(self.num_users, len(conversations))):
                users.create_task(be_a_user())


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Conversations arrive at a rate of their own, however slow the answers are.

    While `max_in_flight` are running, the next ones wait for a place. They were due all the same, so their waiting is part of their
    times, and an overloaded engine looks as slow as it is.
    """

    rate: float
    """Conversations per second."""
    pattern: Pattern = Pattern.POISSON
    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    seed: int | str = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 100_000:
            raise InvalidRequest(f"the rate must be above 0 and at most 100000, got {self.rate}", reason="BAD_FIELD")
        if not 1 <= self.max_in_flight <= MAX_IN_FLIGHT:
            raise InvalidRequest(
                f"max_in_flight must be 1 to {MAX_IN_FLIGHT}, got {self.max_in_flight}", reason="BAD_FIELD"
            )

    def times(self, count: int) -> list[float]:
        """Return when `count` conversations are due, in seconds from the beginning; the first is due at 0."""
        if self.pattern is Pattern.CONSTANT:
            return [index / self.rate for index in range(count)]
        generator = random.Random(f"arrivals/{self.seed}")
        gaps = [generator.expovariate(self.rate) for _ in range(count - 1)]
        return list(itertools.accumulate(gaps, initial=0.0))[:count]

    async def send(
        self, conversations: Sequence[Conversation], converse: Converse, clock: Callable[[], float], sleep: Sleep
    ) -> None:
        """Have all conversations. An error of one ends the others, and is raised in an ExceptionGroup."""
        places = asyncio.Semaphore(self.max_in_flight)

        async def have(conversation: Conversation, due: float) -> None:
            try:
                await converse(conversation, due)
            finally:
                places.release()

        began = clock()
        async with asyncio.TaskGroup() as running:
            for conversation, after in zip(conversations, self.times(len(conversations)), strict=True):
                if (early := began + after - clock()) > 0:
                    await sleep(early)
                await places.acquire()
                running.create_task(have(conversation, began + after))


Arrivals: TypeAlias = ClosedLoop | OpenLoop
