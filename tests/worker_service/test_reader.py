"""When a reader counts as slow: by what waits for it, and never by this process's own pauses."""

from __future__ import annotations

import asyncio
import time

from kvpool.worker_service.servicer import WINDOW_BYTES, ReaderWatch
from tests.until import until

LIMIT = 0.2


class Watched:
    """A watch, and how often it has called."""

    def __init__(self, limit_seconds: float = LIMIT) -> None:
        self.num_calls = 0
        self.watch = ReaderWatch(limit_seconds, self._count)

    def _count(self) -> None:
        self.num_calls += 1


async def test_a_message_that_waits_for_ever_makes_its_reader_slow_once() -> None:
    watched = Watched()
    watched.watch.begin(10)
    await until(lambda: watched.watch.is_slow)
    await asyncio.sleep(2 * LIMIT)
    watched.watch.end()
    watched.watch.end()
    assert watched.num_calls == 1


async def test_time_in_which_nothing_waits_does_not_count() -> None:
    watched = Watched()
    for _ in range(6):
        watched.watch.begin(10)
        watched.watch.end()
        await asyncio.sleep(LIMIT / 2)
    assert watched.num_calls == 0


async def test_a_pause_of_this_process_is_not_the_readers() -> None:
    """Stopped by SIGSTOP, or held up by a long call: the message is taken as soon as somebody looks."""
    watched = Watched()
    watched.watch.begin(10)
    time.sleep(3 * LIMIT)  # noqa: ASYNC251 (that is the point)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not watched.watch.is_slow
    watched.watch.end()


async def test_without_a_limit_nobody_is_slow() -> None:
    watched = Watched(0)
    watched.watch.begin(10)
    await asyncio.sleep(LIMIT)
    assert watched.num_calls == 0


async def test_a_long_message_has_more_time() -> None:
    """Two messages begin together, the one of a hundred windows' size with a hundred times the limit."""
    short, long = Watched(), Watched()
    short.watch.begin(WINDOW_BYTES)
    long.watch.begin(100 * WINDOW_BYTES)
    await until(lambda: short.watch.is_slow)
    assert not long.watch.is_slow
    long.watch.end()
