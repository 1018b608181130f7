"""An attack by name, and what comes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from tests.hostile.arena import Arena

PATIENCE: Final = 15.0
"""Seconds until the cluster must be as before, where no lease has to end first."""
OnDone = Callable[[int], None]
"""Told how much of an attack is done."""


@dataclass
class Outcome:
    said: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def count(self, counter: Counter[str]) -> None:
        """Say how often what came."""
        self.said += [f"{count:,} {what}" for what, count in counter.most_common()]

    async def judge_next_to(self, arena: Arena, what: str, num_refused: int = 0) -> None:
        """While `what` is there the cluster must take new connections and serve."""
        if num_refused:
            self.problems.append(f"of {what} {num_refused} were not accepted")
        self.problems += [f"next to {what}: {one}" for one in await arena.problems(PATIENCE)]


@dataclass(frozen=True)
class Attack:
    """What is done to a cluster. It reports what it was answered, and what is wrong that the cluster does not show afterwards."""

    name: str
    do: Callable[[Arena, Outcome], Coroutine[Any, Any, None]]
    costs_a_session: bool = False
    """The cluster may have to wait for leases until it is as before."""
    is_as_calm: bool = False
    """The good client's calls take no longer than next to no attack, at the 99th percentile less than twice as long."""

    async def run(self, arena: Arena) -> Outcome:
        """Do it. What ends it early is part of the outcome."""
        outcome = Outcome()
        try:
            await self.do(arena, outcome)
        except grpc.aio.AioRpcError as error:
            outcome.problems.append(f"a call that should work did not: {error.code().name}: {error.details()}")
        except (OSError, TimeoutError) as error:
            outcome.problems.append(f"could not connect: {error!r}")
        return outcome


async def status_of(call: Awaitable[object]) -> grpc.StatusCode:
    """What a call is answered."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
