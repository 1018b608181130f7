"""`kvpool top`: workers, requests and blocks, live."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.live import Live

from kvpool.client.block_map import fetch_block_map
from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.errors import KvpoolError, NotFound
from kvpool.v1 import cache_pb2

from ..commands.status import cluster_object, worker_object
from ..terminal import ManagerOption, client_config, print_json, stdout_console
from .keys import DOWN, UP, KeyReader
from .rates import RateMeter, SequenceMeter, sequence_name
from .view import Picture, render

_MAP_SHARE: Final = 20
"""Share of the time for block maps, as a divisor: a large pool's map takes the manager a while."""
_MAP_PAGE_BLOCKS: Final = 512
"""Blocks in one page of the map. The manager does nothing else meanwhile: some ten milliseconds for a thousand blocks."""
_SHOWN_OF_SEQUENCES: Final = ("num_tokens", "num_computed_tokens", "num_cached_tokens", "num_blocks", "fenced")
_MAX_REQUESTS: Final = 200
"""Most requests to fetch, more than a terminal has rows; the manager counts the others."""
_LOOK_SECONDS_MIN: Final = 2.0
"""Shortest time that a look may take before the manager counts as away; the next look begins at once."""
_ONCE_SECONDS: Final = 10.0
"""Time that a look may take if it is not repeated."""


def top(
    worker: Annotated[str | None, typer.Option(help="Show the requests and blocks of this worker first.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print once, with the rates of one interval; the default without a terminal.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Like --once, but print one JSON object and nothing else.")
    ] = False,
    manager: ManagerOption = None,
) -> None:
    """A live view of workers, requests and blocks.

    Rates are of the last five seconds. The list of requests shows the sequences that hold blocks, as the manager knows them:
    workers report block by block, so it lags by some tokens. Requests that wait hold no blocks and are only counted, in `wait`.
    """
    config = client_config(manager)
    console = stdout_console()
    if as_json:
        print_json(picture_object(asyncio.run(_look_once(config, worker, interval))))
    elif once or not console.is_terminal:
        console.print(render(asyncio.run(_look_once(config, worker, interval)), console.width))
    else:
        asyncio.run(_watch(config, console, worker, interval))


async def _look_once(config: ClientConfig, worker: str | None, interval: float) -> Picture:
    """Look twice, an interval apart. The block map is fetched only if a worker is named.

    Raises KvpoolError if the manager is away or does not know the worker.
    """
    async with Client(config=config) as client:
        observer = Observer(client, config.manager, worker)
        await observer.look(_ONCE_SECONDS)
        if observer.error is None:
            await observer.look_at_requests()
            await asyncio.sleep(interval)
            await observer.look(_ONCE_SECONDS)
            await observer.look_at_requests()
        if observer.error is not None:
            raise observer.error
        if worker is not None:
            observer.picture.block_map = await fetch_block_map(client, worker)
    return observer.picture


def picture_object(picture: Picture) -> dict[str, object]:
    """Return the object that `--json` prints: `status --json`, with rates per second and the requests of the chosen worker. Null:
    no rate yet."""
    assert picture.response is not None
    values = cluster_object(picture.manager, picture.response)
    values["workers"] = [
        {**worker_object(worker), "rates": rates and asdict(rates)}
        for worker in picture.workers
        for rates in (picture.rates.get(worker.session),)
    ]
    requests = picture.requests or cache_pb2.WorkerDescription()
    values["requests_of"] = picture.chosen
    values["requests"] = [
        {
            "sequence_id": sequence.key.sequence_id,
            "attempt": sequence.key.attempt,
            "round": sequence.key.round,
            **{name: getattr(sequence, name) for name in _SHOWN_OF_SEQUENCES},
            "generated_tokens_per_second": picture.request_rates.get(sequence_name(requests, sequence)),
        }
        for sequence in requests.sequences
    ]
    return values


async def _watch(config: ClientConfig, console: Console, worker: str | None, interval: float) -> None:
    """Show the live view until q or a signal, and restore the terminal."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with Client(config=config) as client:
        observer = Observer(client, config.manager, worker)
        with KeyReader() as keys, Live(console=console, screen=True, auto_refresh=False) as live:

            def draw() -> None:
                live.update(render(observer.picture, console.width, console.height, keys=True), refresh=True)

            draw()
            work: list[Coroutine[Any, Any, object]] = [
                _repeat(
                    lambda: observer.look(max(interval, _LOOK_SECONDS_MIN)), lambda _: interval, asyncio.Event(), draw
                ),
                _repeat(observer.look_at_requests, lambda _: interval, observer.wants_requests, draw),
                _repeat(
                    observer.look_at_blocks, lambda took: max(interval, _MAP_SHARE * took), observer.wants_map, draw
                ),
                _obey(keys, observer, draw),
                stopped.wait(),
            ]
            tasks = {asyncio.create_task(each) for each in work}
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def _repeat(
    look: Callable[[], Awaitable[None]],
    pause_after: Callable[[float], float],
    wanted: asyncio.Event,
    draw: Callable[[], None],
) -> None:
    """Look again and again, each kind of look apart from the others, so that a slow one delays none. `pause_after` gives the
    seconds to the next look after one that took so long; it begins earlier if it is `wanted`."""
    while True:
        began_at = time.monotonic()
        await look()
        draw()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_after(time.monotonic() - began_at)):
                await wanted.wait()
        wanted.clear()


async def _obey(keys: KeyReader, observer: Observer, draw: Callable[[], None]) -> None:
    """Obey keys until the one that ends the view."""
    while (key := await keys.next()) not in ("q", "Q"):
        if key in (UP, "k"):
            observer.choose(-1)
        elif key in (DOWN, "j", "\t"):
            observer.choose(1)
        elif key == "r":
            observer.toggle_requests()
        elif key == "b":
            observer.toggle_map()
        draw()


class Observer:
    """Polls the manager and keeps the picture up to date."""

    def __init__(self, client: Client, manager: str, worker: str | None) -> None:
        self.picture = Picture(manager, chosen=worker)
        self.error: KvpoolError | None = None
        """Why the manager did not answer the last look; None if it did."""
        self.wants_requests = asyncio.Event()
        """Set when requests are to be shown that were not fetched yet."""
        self.wants_map = asyncio.Event()
        """Set when a block map is to be shown that was not fetched yet."""
        self._client = client
        self._meter = RateMeter()
        self._sequence_meter = SequenceMeter()
        self._answered_at: float | None = None

    async def look(self, seconds: float) -> None:
        """Look at the workers. If the manager does not answer in that time, the picture says so; that is no error."""
        picture = self.picture
        try:
            response = await self._client.describe(timeout=seconds)
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

    async def look_at_requests(self) -> None:
        """Look at the requests of the chosen worker, if they are shown."""
        picture, meter = self.picture, self._sequence_meter
        chosen = picture.chosen
        if chosen is None or not picture.shows_requests:
            return
        workers: Iterable[cache_pb2.WorkerDescription] = ()
        try:
            workers = (await self._client.describe(worker_id=chosen, max_sequences=_MAX_REQUESTS)).workers
        except NotFound:
            pass  # the picture shows it anyway
        except KvpoolError:
            return  # the manager is away, which the other looks show
        # A key pressed meanwhile may have hidden the requests, or begun a new meter.
        if self._sequence_meter is not meter:
            return
        picture.requests = None
        for worker in workers:
            meter.add(worker, time.monotonic())
            picture.requests = worker
            names = [sequence_name(worker, sequence) for sequence in worker.sequences]
            picture.request_rates = {name: meter.generated_tokens(name) for name in names}

    async def look_at_blocks(self) -> None:
        """Look at the blocks of the chosen worker, if they are shown."""
        picture = self.picture
        chosen = picture.chosen
        if chosen is None or not picture.shows_map:
            return
        block_map = None
        try:
            block_map = await fetch_block_map(self._client, chosen, _MAP_PAGE_BLOCKS, group=picture.group)
        except NotFound:
            pass  # the picture shows it anyway
        except KvpoolError:
            return  # the manager is away, which the other looks show
        # A key pressed meanwhile may have chosen another worker.
        if picture.chosen == chosen and picture.shows_map and (block_map is None or block_map.group == picture.group):
            picture.block_map = block_map

    def _say_away(self, error: KvpoolError) -> str:
        if self._answered_at is None:
            return f"no answer yet: {error}"
        return f"no answer for {time.monotonic() - self._answered_at:.0f} s, this is the last answer: {error}"

    def choose(self, step: int) -> None:
        """Choose the worker `step` places down the list, cyclically."""
        names = [worker.worker_id for worker in self.picture.workers]
        if names:
            chosen = self.picture.chosen
            place = names.index(chosen) + step if chosen in names else 0
            self._choose(names[place % len(names)])

    def toggle_map(self) -> None:
        """Show or hide the blocks; for a worker with several groups, show those of the next group first."""
        picture = self.picture
        last = (
            max((len(worker.counts) for worker in picture.workers if worker.worker_id == picture.chosen), default=1) - 1
        )
        if picture.shows_map and picture.group < last:
            picture.group += 1
        else:
            picture.shows_map, picture.group = not picture.shows_map, 0
        self._forget_map()

    def toggle_requests(self) -> None:
        """Show or hide the requests."""
        self.picture.shows_requests = not self.picture.shows_requests
        self._forget_requests()

    def _choose(self, worker: str) -> None:
        self.picture.chosen, self.picture.group = worker, 0
        self._forget_requests()
        self._forget_map()

    def _forget_requests(self) -> None:
        self.picture.requests = None
        # The next look comes at once, perhaps only a moment after the last one: rates of so short a time would be wrong.
        self._sequence_meter = SequenceMeter()
        self.wants_requests.set()

    def _forget_map(self) -> None:
        self.picture.block_map = None
        self.wants_map.set()
