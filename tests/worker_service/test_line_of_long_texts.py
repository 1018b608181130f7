"""The line of long texts: bounded, fair to tenants, and never stuck, whoever leaves it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.long_texts import LongTexts
from tests.until import until


class Line:
    """A line whose first text takes until the test says so; what is tokenised is noted in order."""

    def __init__(self, max_waiting_chars: int = 100) -> None:
        self.texts = LongTexts(max_waiting_chars)
        self.done: list[str] = []
        self.go_on = threading.Event()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, tenant: str, num_chars: int = 10, name: str = "") -> asyncio.Task[None]:
        """A text of the tenant, which waits, or not, when this returns."""
        name = name or f"{tenant}{len(self.tasks)}"

        def work() -> None:
            self.go_on.wait(30)
            self.done.append(name)

        task = self.tasks[name] = asyncio.create_task(self._quietly(self.texts.run(tenant, num_chars, work)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    async def _quietly(self, running: Coroutine[Any, Any, None]) -> None:
        await running

    async def finish(self) -> list[str]:
        """Let all be done; returns the order."""
        self.go_on.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        return self.done


def is_refused(task: asyncio.Task[None]) -> bool:
    error = task.exception() if task.done() else None
    return isinstance(error, EngineError) and error.kind is ErrorKind.BUSY and error.retry_seconds is not None


async def test_tenants_take_turns_however_many_texts_one_of_them_sends() -> None:
    line = Line()
    for tenant in ("a", "a", "a", "a", "b", "c", "b"):
        await line.ask(tenant)
    assert await line.finish() == ["a0", "a1", "b4", "c5", "a2", "b6", "a3"]


async def test_what_waits_is_bounded_and_others_find_room_next_to_one_who_fills_it() -> None:
    """A newcomer displaces the newest text of the tenant that has more than it; a tenant does not displace its own."""
    line = Line(max_waiting_chars=100)
    await line.ask("running")
    flood = [await line.ask("flood") for _ in range(12)]
    assert [is_refused(task) for task in flood] == [False] * 10 + [True] * 2
    other = await line.ask("other", num_chars=40)
    assert not other.done()
    assert [is_refused(task) for task in flood[:10]] == [False] * 6 + [True] * 4
    assert is_refused(await line.ask("third", num_chars=90))
    assert (await line.finish())[:3] == ["running0", "flood1", "other13"]
    assert len(line.done) == 8


async def test_one_text_of_any_length_may_wait() -> None:
    line = Line(max_waiting_chars=5)
    await line.ask("running")
    assert not (await line.ask("a", num_chars=1000)).done()
    assert is_refused(await line.ask("b", num_chars=1))
    assert await line.finish() == ["running0", "a1"]


@pytest.mark.parametrize("gone", ["running", "first", "second", "its turn"])
async def test_a_text_whose_caller_leaves_holds_nobody_up(gone: str) -> None:
    """Also one that is being tokenised, whose thread goes on, and one whose turn has just come."""
    line = Line()
    for name in ("running", "first", "second", "third"):
        await line.ask("a", name=name)
    if gone == "its turn":
        line.texts._next()
        line.tasks["first"].cancel()
        await asyncio.gather(line.tasks["first"], return_exceptions=True)
        expected = {"running", "second", "third"}
    else:
        line.tasks[gone].cancel()
        expected = {"running", "first", "second", "third"} - ({gone} - {"running"})
    await line.finish()
    await until(lambda: len(line.done) == len(expected))
    assert set(line.done) == expected
    assert await asyncio.wait_for(line.texts.run("a", 1, lambda: 7), 20) == 7


async def test_the_error_of_a_text_is_its_own() -> None:
    texts = LongTexts()

    def fail() -> None:
        raise EngineError(ErrorKind.INVALID, "too long")

    with pytest.raises(EngineError, match="too long"):
        await texts.run("a", 1, fail)
    assert await texts.run("a", 1, lambda: 3) == 3
