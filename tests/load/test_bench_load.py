"""Sending a workload: what is noted, what ends a run, and that a turn's prompt is all that was before; blocks in use, sampled."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence

import pytest

from kvpool.client.block_map import BlockMap
from kvpool.client.errors import Unavailable
from kvpool.load.arrivals import ClosedLoop, OpenLoop
from kvpool.load.engine import Delivery, RefusedRequest, ServedRequest
from kvpool.load.load import LoadObserver, Stalled, WrongAnswer, run_load
from kvpool.load.plan import CacheCase, LoadPlan, Measured, measure
from kvpool.load.sample import RequestSample
from kvpool.load.waste import WasteSample, summarise, waste_of
from kvpool.load.workload import DEFAULT_SIZES, ChatTurn, Conversation, LoadWorkload
from kvpool.v1 import cache_pb2, common_pb2

HANG = object()


class ScriptedEngine:
    """Answers with the prompt's length and what follows, two tokens at a time; or as it is told, request by request."""

    def __init__(self, *script: object) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.num_closed = 0
        self._script = deque(script)

    async def served(self) -> ServedRequest:
        return ServedRequest("scripted", range(100, 1000), 8192)

    async def generate(self, prompt: Sequence[int], num_tokens: int) -> AsyncGenerator[Delivery, None]:
        self.prompts.append(tuple(prompt))
        told = self._script.popleft() if self._script else None
        try:
            yield Delivery((), len(prompt) // 2)
            if isinstance(told, Exception):
                raise told
            tokens = range(len(prompt), len(prompt) + (num_tokens if told is None or told is HANG else int(str(told))))
            for start in range(0, len(tokens), 2):
                await asyncio.sleep(0)
                yield Delivery(tuple(tokens[start : start + 2]), None)
                if told is HANG:
                    await asyncio.Event().wait()
        finally:
            self.num_closed += 1

    async def close(self) -> None:
        pass


def single(count: int, num_generated: int = 4) -> list[Conversation]:
    return [Conversation((ChatTurn((index, index), num_generated),)) for index in range(count)]


async def test_a_turn_s_prompt_is_the_whole_conversation_so_far() -> None:
    engine = ScriptedEngine()
    conversation = Conversation((ChatTurn((1, 2, 3), 2), ChatTurn((4,), 3), ChatTurn((5, 6), 1)))
    run = await run_load(engine, [conversation], ClosedLoop(1))
    first = (1, 2, 3)
    second = (*first, 3, 4, 4)
    third = (*second, 6, 7, 8, 5, 6)
    assert engine.prompts == [first, second, third]
    assert [(sample.turn, sample.num_prompt_tokens, sample.num_generated_tokens) for sample in run.samples] == [
        (1, 3, 2), (2, 6, 3), (3, 11, 1),
    ]  # fmt: skip
    assert run.error is None
    assert len(run.complete) == run.num_planned == 3


async def test_what_came_is_noted_with_its_time_and_what_was_cached() -> None:
    seen: list[RequestSample] = []
    run = await run_load(
        ScriptedEngine(), single(2, num_generated=5), ClosedLoop(2), LoadObserver(on_request=seen.append)
    )
    assert len(seen) == 2
    for sample in run.samples:
        assert sample.num_cached_tokens == 1
        assert [arrived.num_tokens for arrived in sample.arrived] == [2, 2, 1]
        assert sample.due <= sample.arrived[0].at <= sample.arrived[-1].at
    assert run.seconds >= max(sample.end_to_end for sample in run.samples)


async def test_a_refusal_is_counted_and_ends_its_own_conversation_only() -> None:
    engine = ScriptedEngine(None, RefusedRequest("1,024 requests are waiting already"))
    conversation = Conversation((ChatTurn((1,), 1), ChatTurn((2,), 1), ChatTurn((3,), 1)))
    run = await run_load(engine, [conversation, *single(1)], ClosedLoop(1))
    assert run.error is None
    assert [sample.refusal is not None for sample in run.samples] == [False, True, False]
    assert (len(run.complete), run.num_refused, run.num_planned) == (2, 1, 4)


async def test_an_error_ends_the_run_and_leaves_the_figures_so_far() -> None:
    engine = ScriptedEngine(None, HANG, ValueError("the worker is gone"))
    run = await run_load(engine, single(10), OpenLoop(1e5, max_in_flight=2, seed=1))
    assert str(run.error) == "the worker is gone"
    assert (len(run.complete), run.num_planned) == (1, 10)
    # The one that hung had begun to answer; it is broken off and does not count.
    assert sorted(sample.num_generated_tokens for sample in run.samples) == [0, 2, 4]
    assert engine.num_closed == len(engine.prompts) == 3


async def test_an_answer_of_another_length_is_an_error() -> None:
    run = await run_load(ScriptedEngine(3), single(1, num_generated=4), ClosedLoop(1))
    assert isinstance(run.error, WrongAnswer)
    assert "4 tokens were asked for, 3 came" in str(run.error)
    assert run.complete == []


async def test_an_engine_that_falls_silent_ends_the_run() -> None:
    """By the watch's own clock, which only sleeping moves: no time passes here."""
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        for _ in range(5):
            await asyncio.sleep(0)

    engine = ScriptedEngine(None, HANG)
    watch = LoadObserver(stall_seconds=30.0, clock=lambda: now, sleep=sleep)
    run = await run_load(engine, single(3), ClosedLoop(1), watch)
    assert isinstance(run.error, Stalled)
    assert "nothing has come for 33 s" in str(run.error)
    assert len(run.complete) == 1
    assert engine.num_closed == 2


async def test_blocks_are_looked_at_while_it_runs_and_a_look_that_fails_is_left_out() -> None:
    found = WasteSample(16, 15, 0)
    num_looks = 0

    async def look() -> WasteSample:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 2:
            raise Unavailable("the manager restarts")
        return found

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0)

    run = await run_load(ScriptedEngine(), single(5), ClosedLoop(1), LoadObserver(look_at_blocks=look, sleep=sleep))
    before = num_looks
    await asyncio.sleep(0.01)
    assert before > 2
    assert run.waste == [found] * (before - 1)
    assert run.error is None
    assert num_looks == before


async def test_a_measurement_warms_up_and_repeats_with_fresh_tokens() -> None:
    engine = ScriptedEngine()
    told: list[str] = []
    plan = LoadPlan(
        LoadWorkload.CHATS, ClosedLoop(2), 3, DEFAULT_SIZES[LoadWorkload.CHATS], repetitions=2, cases=tuple(CacheCase)
    )
    measured = Measured(plan)
    await measure(engine, plan, measured, LoadObserver(), told.append)
    assert told == [
        "warm-up, cold", "warm-up, warm", "repetition 1 of 2, cold", "repetition 1 of 2, warm",
        "repetition 2 of 2, cold", "repetition 2 of 2, warm",
    ]  # fmt: skip
    assert {case: len(runs) for case, runs in measured.runs.items()} == {CacheCase.COLD: 2, CacheCase.WARM: 2}
    assert measured.error is None
    runs = [set(engine.prompts[start : start + 18]) for start in range(0, len(engine.prompts), 18)]
    assert len(runs) == 6
    for cold, warm in zip(runs[::2], runs[1::2], strict=True):
        assert cold == warm
    assert not any(runs[a] & runs[b] for a in (0, 2, 4) for b in (0, 2, 4) if a != b)


async def test_an_error_in_the_warm_up_ends_the_measurement_with_nothing() -> None:
    plan = LoadPlan(LoadWorkload.SHARED, ClosedLoop(2), 3, DEFAULT_SIZES[LoadWorkload.SHARED])
    measured = Measured(plan)
    await measure(ScriptedEngine(None, ValueError("gone")), plan, measured, LoadObserver(), lambda what: None)
    assert (measured.runs, str(measured.error)) == ({}, "gone")


HELD, CACHED = cache_pb2.BLOCK_STATE_HELD, cache_pb2.BLOCK_STATE_CACHED
RESERVED, FREE = cache_pb2.BLOCK_STATE_RESERVED, cache_pb2.BLOCK_STATE_FREE


def block(
    state: cache_pb2.BlockState, index: int = 0, *owners: str, sealed: bool = False, token_count: int = 0
) -> cache_pb2.BlockDescription:
    return cache_pb2.BlockDescription(
        state=state,
        table_index=index,
        sealed=sealed,
        token_count=token_count,
        ref_count=len(owners),
        owners=[common_pb2.SequenceKey(sequence_id=owner, attempt=1) for owner in owners],
    )


SEALED = [block(HELD, index, "a", sealed=index < 2) for index in range(3)]
SHARED = [block(HELD, 0, "a", "b", sealed=True), block(HELD, 1, "a"), block(HELD, 1, "b")]
OTHERS = [block(HELD, 0, "x", sealed=True, token_count=16), block(HELD, 1, "x", token_count=5)]


@pytest.mark.parametrize(
    ("lengths", "blocks", "expected"),
    [
        pytest.param({"a": 40}, SEALED, WasteSample(48, 40, 0), id="the end of the last block is waste"),
        pytest.param(
            {"a": 40},
            [block(HELD, index, "a") for index in range(3)],
            WasteSample(48, 40, 0),
            id="the slots of a prompt are assigned before they are computed",
        ),
        pytest.param({"a": 20, "b": 30}, SHARED, WasteSample(48, 16 + 4 + 14, 0), id="shared blocks count once"),
        pytest.param({}, [block(FREE), block(CACHED, sealed=True)], WasteSample(0, 0, 0), id="others hold nothing"),
        pytest.param(
            {"a": 18},
            [block(HELD, 0, "a"), block(RESERVED), block(RESERVED)],
            WasteSample(32, 18, 16),
            id="the manager does not know yet that the sequence has taken a second block out of the reserve",
        ),
        pytest.param(
            {"a": 40},
            [block(HELD, 0, "a"), block(RESERVED)],
            WasteSample(32, 32, 0),
            id="a length that is ahead of the map takes no more than there is in the reserve",
        ),
        pytest.param({}, OTHERS, WasteSample(32, 21, 0), id="the manager counts the sequences of others"),
    ],
)
def test_waste_is_what_is_held_and_has_no_token(
    lengths: dict[str, int], blocks: list[cache_pb2.BlockDescription], expected: WasteSample
) -> None:
    """On a worker of block size 16."""
    assert waste_of(BlockMap("w", 16, 1 + len(blocks), tuple(blocks)), lengths) == expected


def test_samples_count_by_what_was_held() -> None:
    found = summarise([WasteSample(100, 90, 50), WasteSample(300, 300, 50), WasteSample(0, 0, 50)])
    assert found is not None
    assert found._asdict() == pytest.approx({"num_samples": 2, "waste": 10 / 400, "waste_max": 0.1, "reserve": 0.25})
    assert summarise([WasteSample(0, 0, 50)]) is None
