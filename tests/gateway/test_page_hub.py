"""One stream of the manager for all browsers of a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from kvpool.client import Unimplemented
from kvpool.gateway.pages.hub import Hub, PageViewer
from kvpool.v1 import cache_pb2
from tests.gateway.scripted_pictures import BrowserMirror, ScriptedPictures, one_worker
from tests.until import until


def viewing(hub: Hub) -> aclosing[AsyncGenerator[bytes, None]]:
    return aclosing(hub.events())


@pytest.fixture
def source() -> ScriptedPictures:
    return ScriptedPictures()


@pytest.fixture
def hub(source: ScriptedPictures) -> Hub:
    return Hub(source.open, retry_seconds=0)


async def take_until(events: AsyncGenerator[bytes, None], mirror: BrowserMirror, number: int) -> None:
    while not mirror.numbers or mirror.numbers[-1] != number:
        mirror.take(await anext(events))


async def test_all_browsers_share_one_stream_which_ends_with_the_last_of_them(
    source: ScriptedPictures, hub: Hub
) -> None:
    """And who comes later gets a whole picture of now."""
    mirrors = [BrowserMirror() for _ in range(3)]
    source.send(one_worker(1, {1: (2, 0, 0, 0)}, whole=True))
    async with viewing(hub) as first, viewing(hub) as second:
        await take_until(first, mirrors[0], 1)
        await take_until(second, mirrors[1], 1)
        assert source.num_opened == source.num_open == 1
    await until(lambda: source.num_open == 0)
    assert hub.num_viewers == 0
    assert hub._news(PageViewer(manager_no=1)) == [], "nothing is left of the old picture"
    source.send(one_worker(1, {1: (3, 1, 0, 0)}, whole=True))
    async with viewing(hub) as third:
        await take_until(third, mirrors[2], 1)
    assert mirrors[2].workers["1"]["blocks"][0][1][0] == 3


async def test_a_slow_browser_gets_a_later_picture_and_no_queue(source: ScriptedPictures, hub: Hub) -> None:
    quick, slow = BrowserMirror(), BrowserMirror()
    source.send(one_worker(1, {1: (2, 0, 0, 0)}, whole=True))
    async with viewing(hub) as quick_events, viewing(hub) as slow_events:
        await take_until(slow_events, slow, 1)
        await take_until(quick_events, quick, 1)
        for number in range(2, 101):
            source.send(one_worker(number, {number: (3, 1, number, 0)}, whole=False))
            await take_until(quick_events, quick, number)
        await take_until(slow_events, slow, 100)
    assert len(quick.numbers) == 100
    assert slow.numbers == [1, 100]
    assert slow.workers == quick.workers


async def test_a_manager_that_goes_away_is_reported_and_its_return_too(source: ScriptedPictures, hub: Hub) -> None:
    """The old picture stays until the new one comes."""
    mirror = BrowserMirror()
    source.send(one_worker(1, {1: (2, 0, 0, 0)}, whole=True))
    async with viewing(hub) as events:
        await take_until(events, mirror, 1)
        source.lose()
        while mirror.manager[-1] != "away":
            mirror.take(await anext(events))
        assert mirror.workers["1"]["blocks"][0][1][0] == 2
        source.send(one_worker(1, {2: (3, 0, 0, 0)}, whole=True, session=9))
        while mirror.manager[-1] != "up" or "9" not in mirror.workers:
            mirror.take(await anext(events))
    assert set(mirror.workers) == {"9"}


async def test_a_browser_that_leaves_in_the_middle_leaves_nothing(source: ScriptedPictures, hub: Hub) -> None:
    """Also one that waits for a picture that never comes."""

    async def look() -> None:
        async with viewing(hub) as events:
            async for _ in events:
                pass

    waiting = asyncio.create_task(look())
    await until(lambda: source.num_open == 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: source.num_open == hub.num_viewers == 0)


async def test_a_manager_without_watch_is_reported_too() -> None:
    """The page says why it shows nothing."""

    async def watch() -> AsyncGenerator[cache_pb2.Picture, None]:
        raise Unimplemented("this manager has no Watch")
        yield cache_pb2.Picture()

    mirror = BrowserMirror()
    async with viewing(Hub(watch, retry_seconds=0)) as events:
        while "away" not in mirror.manager:
            mirror.take(await anext(events))
    assert mirror.numbers == []
