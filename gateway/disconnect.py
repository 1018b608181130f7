"""Ends the work for a reader that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ReaderLeft(Exception):
    """The reader has gone; nobody waits for the answer any more."""


async def unless_reader_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the reader goes away before, cancel `work`, wait for its end and raise ReaderLeft.

    The request's body must have been read."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_until_left(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ReaderLeft
    finally:
        tasks = [task for task in (working, watching) if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
