"""When conversations begin, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvpool.client.errors import InvalidRequest
from kvpool.load.arrivals import Arrivals, ClosedLoop, OpenLoop, Pattern
from kvpool.load.workload import ChatTurn, Conversation
from tests.until import until


def conversations(count: int) -> list[Conversation]:
    return [Conversation((ChatTurn((index,), 1),)) for index in range(count)]


@dataclass
class Stage:
    """A clock that runs only while somebody sleeps, and conversations that end when they are told to."""

    now: float = 0.0
    dues: dict[int, float] = field(default_factory=dict)
    starts: dict[int, float] = field(default_factory=dict)
    ends: dict[int, asyncio.Event] = field(default_factory=dict)
    num_running: int = 0
    num_running_max: int = 0

    async def sleep(self, seconds: float) -> None:
        await settle()
        self.now += seconds

    async def converse(self, conversation: Conversation, due: float) -> None:
        (index,) = conversation.turns[0].new_tokens
        self.dues[index], self.starts[index] = due, self.now
        self.ends[index] = asyncio.Event()
        self.num_running += 1
        self.num_running_max = max(self.num_running_max, self.num_running)
        await self.ends[index].wait()
        self.num_running -= 1

    async def end(self, sending: asyncio.Task[None]) -> None:
        for end in self.ends.values():
            end.set()
        await sending

    def send(self, arrivals: Arrivals, count: int) -> asyncio.Task[None]:
        sending = arrivals.send(conversations(count), self.converse, lambda: self.now, self.sleep)
        return asyncio.ensure_future(sending)


async def settle() -> None:
    """Until every task has come as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_closed_loop_keeps_its_users_busy_until_nothing_is_left() -> None:
    stage = Stage()
    sending = stage.send(ClosedLoop(3), 7)
    for num_ended in range(7):
        await settle()
        assert stage.num_running == min(3, 7 - num_ended)
        oldest = min(index for index, end in stage.ends.items() if not end.is_set())
        stage.now += 1.0
        stage.ends[oldest].set()
    await sending
    assert stage.num_running_max == 3
    # A conversation is due when its user is free, not before.
    assert stage.dues == stage.starts
    assert [stage.dues[index] for index in range(7)] == [0, 0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("pattern", list(Pattern))
async def test_the_times_of_an_open_loop_do_not_depend_on_answers(pattern: Pattern) -> None:
    """Nothing is ever answered, and yet all is sent when it is due."""
    stage, loop = Stage(), OpenLoop(10.0, pattern, max_in_flight=50, seed=5)
    sending = stage.send(loop, 50)
    await until(lambda: stage.num_running == 50, pause=0)
    assert [stage.starts[index] for index in range(50)] == pytest.approx(loop.times(50))
    assert [stage.dues[index] for index in range(50)] == pytest.approx(loop.times(50))
    await stage.end(sending)


async def test_an_open_loop_respects_its_bound_and_counts_the_waiting() -> None:
    stage, loop = Stage(), OpenLoop(1.0, Pattern.CONSTANT, max_in_flight=2)
    sending = stage.send(loop, 4)
    await until(lambda: stage.now == 2.0, pause=0)  # the third is due
    await settle()
    assert sorted(stage.starts) == [0, 1]
    stage.now = 10.0
    stage.ends[0].set()
    stage.ends[1].set()
    await until(lambda: len(stage.starts) == 4, pause=0)
    assert stage.dues == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}
    assert stage.starts == {0: 0.0, 1: 1.0, 2: 10.0, 3: 10.0}
    assert stage.num_running_max == 2
    await stage.end(sending)


def test_poisson_arrivals_have_exponential_gaps_and_their_rate() -> None:
    times = OpenLoop(20.0, seed=1).times(20_000)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert OpenLoop(20.0, seed=1).times(100) == times[:100]
    assert OpenLoop(20.0, seed=2).times(100) != times[:100]


@pytest.mark.parametrize("arrivals", [ClosedLoop(2), OpenLoop(1000.0, max_in_flight=2)], ids=["closed", "open"])
async def test_an_error_ends_the_others(arrivals: Arrivals) -> None:
    cancelled: list[int] = []

    async def converse(conversation: Conversation, due: float) -> None:
        (index,) = conversation.turns[0].new_tokens
        if index == 1:
            raise ValueError("broken")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(index)
            raise

    async def sleep(seconds: float) -> None:
        await settle()

    with pytest.raises(ExceptionGroup) as raised:
        await arrivals.send(conversations(5), converse, lambda: 0.0, sleep)
    assert raised.group_contains(ValueError)
    assert cancelled == [0]


@pytest.mark.parametrize("make", [lambda: ClosedLoop(0), lambda: OpenLoop(0.0), lambda: OpenLoop(1.0, max_in_flight=0)])
def test_nonsense_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequest, match=r"must be"):
        make()
