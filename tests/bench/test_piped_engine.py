"""Engines in processes of their own: what comes over the pipe, and what is said when there is nothing more to come."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from bench.piped_engine import EngineFailed, PipedEngine
from kvpool.load.arrivals import ClosedLoop
from kvpool.load.engine import ServedRequest
from kvpool.load.load import run_load
from kvpool.load.workload import ChatTurn, Conversation
from tests.client.processes import is_alive, state
from tests.cluster.polling import eventually
from tests.until import until

SERVED = ServedRequest("counting", range(10, 100), 1000)


async def start(*arguments: str, seconds: float = 60.0) -> PipedEngine:
    command = [sys.executable, "-m", "tests.bench.counting_child", *arguments]
    return await PipedEngine.start("counting", command, {}, SERVED, seconds)


@asynccontextmanager
async def counting() -> AsyncIterator[PipedEngine]:
    engine = await start()
    try:
        yield engine
    finally:
        await engine.close()


def cpu_ticks(pid: int) -> int:
    """CPU time that a process has used, in ticks of the clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def answer(engine: PipedEngine, *prompt: int, num_tokens: int = 3) -> list[int]:
    return [token async for delivery in engine.generate(prompt, num_tokens) for token in delivery.token_ids]


async def test_answers_do_not_mix_and_noise_stays_out() -> None:
    async with counting() as engine:
        assert engine.facts == {"engine": "counting"}
        found = await asyncio.gather(*(answer(engine, 10, 100 * index, num_tokens=index + 1) for index in range(20)))
    assert found == [[100 * index + 1 + k for k in range(index + 1)] for index in range(20)]


async def test_a_workload_runs_on_it() -> None:
    async with counting() as engine:
        conversations = [Conversation((ChatTurn((10, 20), 2), ChatTurn((30,), 1)))] * 3
        run = await run_load(engine, conversations, ClosedLoop(2))
    assert run.error is None
    assert len(run.complete) == run.num_planned == 6
    assert {sample.num_cached_tokens for sample in run.samples} == {0}


async def test_a_request_that_fails_says_why_and_harms_no_other() -> None:
    async with counting() as engine:
        with pytest.raises(EngineFailed, match="counting: ValueError: no such prompt"):
            await answer(engine, 1)
        assert await answer(engine, 10, num_tokens=1) == [11]


async def test_a_request_that_is_left_is_ended_on_the_other_side() -> None:
    async with counting() as engine:
        async with aclosing(engine.generate((3,), 5)) as deliveries:
            assert (await anext(deliveries)).num_cached_tokens == 0

        async def has_ended() -> bool:
            async with aclosing(engine.generate((10,), 1)) as deliveries:
                return (await anext(deliveries)).num_cached_tokens == 1

        await eventually(has_ended, "the child hears of it")


async def test_a_process_that_ends_is_told_with_the_end_of_its_log() -> None:
    async with counting() as engine:
        waiting = asyncio.create_task(answer(engine, 3))
        await asyncio.sleep(0)
        with pytest.raises(EngineFailed, match=r"(?s)counting has ended.*out of memory"):
            await answer(engine, 2)
        with pytest.raises(EngineFailed, match="counting has ended"):
            await waiting
        with pytest.raises(EngineFailed, match="counting has ended"):
            await answer(engine, 10)


async def test_an_engine_that_does_not_start_says_why() -> None:
    with pytest.raises(EngineFailed, match=r"(?s)counting has ended.*there is no model"):
        await start("unready")
    with pytest.raises(EngineFailed, match="counting was not ready after 2 s"):
        await start("slow", seconds=2.0)


async def test_nothing_is_left_of_a_start_that_was_cancelled(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    starting = asyncio.create_task(start("never", str(pid)))
    await until(lambda: pid.exists() and pid.read_text())
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: not is_alive(int(pid.read_text())))


async def test_a_suspended_engine_does_nothing_until_it_is_resumed() -> None:
    async with counting() as engine:
        engine.suspend()
        waiting = asyncio.create_task(answer(engine, 10, num_tokens=1))
        await until(lambda: state(engine.pid) == "T")
        before = cpu_ticks(engine.pid)
        done, _ = await asyncio.wait({waiting}, timeout=0.5)
        assert not done
        assert cpu_ticks(engine.pid) == before
        engine.resume()
        assert await waiting == [11]
        engine.suspend()


async def test_closing_ends_the_process_and_what_it_has_started(tmp_path: Path) -> None:
    engine = await start("parent", str(tmp_path / "pid"))
    pids = [engine.pid, int((tmp_path / "pid").read_text())]
    assert all(is_alive(pid) for pid in pids)
    await engine.close()
    await until(lambda: not any(is_alive(pid) for pid in pids))
