"""`kvpool top`: workers, requests and blocks, live."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.live import Live

from ..block_map import fetch_block_map
from ..client import Client
from ..config import ClientConfig
from ..errors import KvpoolError, NotFound
from .keys import DOWN, UP, Keys
from .rates import RateMeter
from .terminal import ManagerOption, client_config, stdout_console
from .top_view import Picture, render

_MAP_SHARE: Final = 20
"""The block map of a large pool takes the manager a while: it is asked for at most a twentieth of the time."""
_MAP_PAGE_BLOCKS: Final = 512
"""While it describes a page the manager does nothing else: some ten milliseconds for a thousand blocks."""
_LOOK_SECONDS_MIN: Final = 2.0
"""How long a look may take at least before the manager counts as away."""


def top(
    worker: Annotated[str | None, typer.Option("--worker", help="Show the blocks of this worker first.")] = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between two looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, an interval apart, print, and end; so it is without a terminal.")
    ] = False,
    manager: ManagerOption = None,
) -> None:
    """A live view of workers, requests and blocks. Rates are of the last five seconds."""
    config = client_config(manager)
    console = stdout_console()
    if once or not console.is_terminal:
        asyncio.run(_print_once(config, console, worker, interval))
    else:
        asyncio.run(_watch(config, console, worker, interval))


async def _print_once(config: ClientConfig, console: Console, worker: str | None, interval: float) -> None:
    """Raises KvpoolError if the manager is away, or does not know the worker."""
    async with Client(config=config) as client:
        observer = Observer(client, config.manager, worker)
        await observer.look(interval)
        if observer.error is None:
            await asyncio.sleep(interval)
            await observer.look(interval)
        if observer.error is not None:
            raise observer.error
        if worker is not None:
            observer.picture.block_map = await fetch_block_map(client, worker)
    console.print(render(observer.picture, console.width))


async def _watch(config: ClientConfig, console: Console, worker: str | None, interval: float) -> None:
    """Until q, or a signal: the terminal is then as it was."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with Client(config=config) as client:
        observer = Observer(client, config.manager, worker)
        with Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:

            def draw() -> None:
                live.update(render(observer.picture, console.width, console.height, keys=True), refresh=True)

            looking = asyncio.create_task(_look_for_ever(observer, interval, draw))
            mapping = asyncio.create_task(_map_for_ever(observer, interval, draw))
            pressing = asyncio.create_task(_obey(keys, observer, draw))
            stopping = asyncio.create_task(stopped.wait())
            tasks = {looking, mapping, pressing, stopping}
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    if stopped.is_set():
        sys.exit(128 + signal.SIGTERM)


async def _look_for_ever(observer: Observer, interval: float, draw: Callable[[], None]) -> None:
    while True:
        draw()
        await observer.look(interval)
        draw()
        await asyncio.sleep(interval)


async def _map_for_ever(observer: Observer, interval: float, draw: Callable[[], None]) -> None:
    """Beside the looks, which it must not hold up."""
    while True:
        began_at = time.monotonic()
        await observer.look_at_blocks()
        draw()
        pause = max(interval, _MAP_SHARE * (time.monotonic() - began_at))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await observer.wants_map.wait()
        observer.wants_map.clear()


async def _obey(keys: Keys, observer: Observer, draw: Callable[[], None]) -> None:
    """Until the key that ends it."""
    while (key := await keys.next()) not in ("q", "Q"):
        if key in (UP, "k"):
            observer.choose(-1)
        elif key in (DOWN, "j", "\t"):
            observer.choose(1)
        elif key == "b":
            observer.toggle_map()
        draw()


class Observer:
    """Asks the manager again and again, and keeps the picture up to date."""

    def __init__(self, client: Client, manager: str, worker: str | None) -> None:
        self.picture = Picture(manager, chosen=worker)
        self.error: KvpoolError | None = None
        """Why the manager did not answer the last look; None if it did."""
        self.wants_map = asyncio.Event()
        """A block map is to be shown that is not known yet."""
        self._client = client
        self._shows_map = True
        self._meter = RateMeter()
        self._answered_at: float | None = None

    async def look(self, interval: float) -> None:
        """At the workers. A manager that does not answer is no error here: the picture says so."""
        picture = self.picture
        try:
            response = await self._client.describe(timeout=max(interval, _LOOK_SECONDS_MIN))
        except KvpoolError as error:
            self.error = error
            picture.away = self._say_away(error)
            return
        self._answered_at = time.monotonic()
        self._meter.add(response, self._answered_at)
        picture.response, picture.away, self.error = response, "", None
        picture.rates = {worker.session: self._meter.rates(worker.session) for worker in response.workers}
        if picture.chosen is None and picture.workers:
            self._choose(picture.workers[0].worker_id)

    async def look_at_blocks(self) -> None:
        """At those of the chosen worker, if they are shown."""
        picture = self.picture
        chosen = picture.chosen
        if chosen is None or not self._shows_map:
            return
        block_map, note = None, ""
        try:
            block_map = await fetch_block_map(self._client, chosen, _MAP_PAGE_BLOCKS)
        except NotFound:
            note = f"{chosen} is not there; ↑ ↓ chooses another worker"
        except KvpoolError:
            return  # the manager is away, which the other looks tell
        # Somebody may have pressed a key meanwhile.
        if picture.chosen == chosen and self._shows_map:
            picture.block_map, picture.map_note = block_map, note

    def _say_away(self, error: KvpoolError) -> str:
        if self._answered_at is None:
            return f"no answer yet: {error}"
        return f"no answer for {time.monotonic() - self._answered_at:.0f} s, this is what it was: {error}"

    def choose(self, step: int) -> None:
        """The worker that stands so many places further."""
        names = [worker.worker_id for worker in self.picture.workers]
        if names:
            chosen = self.picture.chosen
            place = names.index(chosen) + step if chosen in names else 0
            self._choose(names[place % len(names)])

    def toggle_map(self) -> None:
        """Show the blocks, or no longer."""
        self._shows_map = not self._shows_map
        self._choose(self.picture.chosen)

    def _choose(self, worker: str | None) -> None:
        self.picture.chosen = worker
        self.picture.block_map, self.picture.map_note = None, ""
        self.wants_map.set()
