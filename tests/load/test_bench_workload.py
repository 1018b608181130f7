"""What `bench serve` asks for: what is shared, how turns join on, how long things are, and when conversations begin."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile

import pytest

from kvpool.client.errors import InvalidRequest
from kvpool.load.arrivals import Arrivals, ClosedLoop, OpenLoop, Pattern
from kvpool.load.engine import ServedRequest
from kvpool.load.plan import CacheCase, LoadPlan, default_sizes
from kvpool.load.workload import (
    DEFAULT_SIZES,
    LOG_NORMAL_SIGMA,
    ChatTurn,
    Conversation,
    LoadWorkload,
    RequestSizes,
    make_workload,
)
from tests.until import until

VOCABULARY = range(10, 50_000)


def made(
    workload: LoadWorkload, count: int = 8, *, seed: int | str = 1, max_model_len: int = 8192, **sizes: int
) -> list[Conversation]:
    asked = replace(DEFAULT_SIZES[workload], **sizes)
    return make_workload(workload, asked, count, vocabulary=VOCABULARY, max_model_len=max_model_len, seed=seed)


def prompts(conversations: list[Conversation]) -> list[tuple[int, ...]]:
    return [conversation.turns[0].new_tokens for conversation in conversations]


def num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.parametrize(
    ("workload", "prefix", "own"),
    [(LoadWorkload.SHARED, 512, 32), (LoadWorkload.DOCUMENT, 4096, 32), (LoadWorkload.UNSHARED, 0, 544)],
)
def test_all_prompts_begin_with_the_prefix_and_with_no_more(workload: LoadWorkload, prefix: int, own: int) -> None:
    found = prompts(made(workload))
    assert {len(prompt) for prompt in found} == {prefix + own}
    assert {num_common(found[0], prompt) for prompt in found[1:]} == {prefix}


def test_chats_have_turns_that_each_add_their_own() -> None:
    for conversation in made(LoadWorkload.CHATS):
        assert [(len(turn.new_tokens), turn.num_generated) for turn in conversation.turns] == [(100, 50)] * 6
        assert conversation.num_tokens == 6 * 150
        assert len({turn.new_tokens for turn in conversation.turns}) == 6


def test_chats_may_begin_with_one_prefix() -> None:
    found = made(LoadWorkload.CHATS, prefix_tokens=64)
    assert {num_common(prompts(found)[0], prompt) for prompt in prompts(found)[1:]} == {64}
    assert {len(turn.new_tokens) for conversation in found for turn in conversation.turns[1:]} == {100}


def test_mixed_lengths_are_log_normal_with_the_mean_asked_for() -> None:
    found = made(
        LoadWorkload.MIXED, 5_000, max_model_len=1 << 20, prefix_tokens=0, own_tokens=300, generated_tokens=100
    )
    lengths = [len(prompt) for prompt in prompts(found)]
    # The standard error of the mean of such a distribution is 1.3 % of it here; the seed is always the same.
    assert statistics.fmean(lengths) == pytest.approx(300, rel=0.03)
    assert statistics.fmean(conversation.num_tokens for conversation in found) == pytest.approx(400, rel=0.03)
    assert statistics.median(lengths) == pytest.approx(300 / 2.718281828 ** (LOG_NORMAL_SIGMA**2 / 2), rel=0.03)


def test_half_of_the_longer_mixed_prompts_share_the_prefix_and_none_is_too_long() -> None:
    found = made(LoadWorkload.MIXED, 2_000, max_model_len=600)
    assert max(conversation.num_tokens for conversation in found) == 600
    longer = [prompt for prompt in prompts(found) if len(prompt) > 128]
    beginnings = [prompt[:128] for prompt in longer]
    prefix = statistics.mode(beginnings)
    assert beginnings.count(prefix) / len(longer) == pytest.approx(0.5, abs=0.06)
    assert all(num_common(prompt, prefix) == 0 for prompt in longer if prompt[:128] != prefix)


@pytest.mark.parametrize("workload", list(LoadWorkload))
def test_the_same_seed_gives_the_same_and_another_one_shares_nothing(workload: LoadWorkload) -> None:
    assert made(workload, seed=3) == made(workload, seed=3)
    one, other = prompts(made(workload, seed=3)), prompts(made(workload, seed=4))
    assert {num_common(a, b) for a in one for b in other} <= {0, 1}


def test_repetitions_share_nothing_with_each_other() -> None:
    plan = LoadPlan(
        LoadWorkload.SHARED, ClosedLoop(4), 4, DEFAULT_SIZES[LoadWorkload.SHARED], repetitions=3, cases=tuple(CacheCase)
    )
    served = ServedRequest("model", VOCABULARY, 8192)
    firsts = [prompts(plan.conversations(served, repetition))[0] for repetition in range(4)]
    assert all(num_common(a, b) == 0 for a in firsts for b in firsts if a is not b)


@pytest.mark.parametrize(
    ("workload", "sizes", "wanted"),
    [
        (LoadWorkload.UNSHARED, {"prefix_tokens": 1}, "--prefix-tokens must be 0, got 1"),
        (LoadWorkload.SHARED, {"turns": 2}, "--workload chats"),
        (LoadWorkload.CHATS, {"turns": 60}, "has 9000 tokens with its answers, its workers take 8192"),
        (LoadWorkload.SHARED, {"own_tokens": 0}, "own_tokens must be at least 1, got 0"),
    ],
)
def test_nonsense_is_refused_with_what_to_change(workload: LoadWorkload, sizes: dict[str, int], wanted: str) -> None:
    with pytest.raises(InvalidRequest, match=wanted):
        made(workload, **sizes)


def test_sizes_that_are_not_given_are_the_workload_s_own() -> None:
    assert default_sizes(LoadWorkload.CHATS, turns=2, own_tokens=None) == RequestSizes(0, 100, 50, turns=2)


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
