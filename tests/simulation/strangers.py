"""Peers that repeat themselves for ever, next to which everybody else must get on.

They begin at some moment and go on until all others are quiet. Once all that is broken has healed the manager starts again next to
them, and from then on the laws of progress are looked at: in a network that works they hold whatever these peers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from kvpool.client.watch import ManagerAway, Watch
from kvpool.v1 import cache_pb2, cache_pb2_grpc, common_pb2
from tests.cache_service.edge.peer import BLOCK_SIZE, Worker, registration
from tests.simulation.client_process import ClientProcess
from tests.simulation.manager import KEEP_ALIVE_SECONDS, LEASE_SECONDS, MAX_WATCHERS
from tests.simulation.process import Process

if TYPE_CHECKING:
    from tests.simulation.worker import WorkerProcess
    from tests.simulation.world import World

FINGERPRINT = "stranger"
CALL_SECONDS = 2.0
HOLE_SECONDS = 5.0 * LEASE_SECONDS


class _Stranger(Worker):
    """One registration after the other, each with state to report. All calls raise AioRpcError."""

    seconds = CALL_SECONDS

    def __init__(self, process: Process, name: str) -> None:
        introduction = registration(name, num_blocks=64, process_key=b"stranger", model_fingerprint=FINGERPRINT)
        introduction.holds_state = True
        introduction.ClearField("address")
        super().__init__(cache_pb2_grpc.CacheServiceStub(process.world.manager_channel(process)), introduction)

    async def register(self) -> cache_pb2.RegisterResponse:
        """As if it had never seen a manager, with a larger number each time, also where no answer came."""
        try:
            return await super().register()
        except grpc.aio.AioRpcError:
            self.request.register_no += 1
            raise
        finally:
            self.request.highest_epoch_seen = self.request.last_session = 0

    async def report(self, part: int) -> None:
        """The next part of a report that never ends."""
        request = cache_pb2.ReportRequest(uplink=self.uplink(), part=part, live=part == 0)
        if part:
            run = request.contents.add(tokens=part.to_bytes(4, "little") * BLOCK_SIZE)
            run.root.model_fingerprint = FINGERPRINT
            run.blocks.add(group=0, tier=common_pb2.TIER_DEVICE, block_ids=[0], generations=[0])
        await self.stub.Report(request, timeout=self.seconds)


async def _register_for_ever(process: Process, draw: random.Random) -> None:
    stranger, is_one, seconds = _Stranger(process, "again"), draw.random() < 0.5, draw.choice([0.2, 1.0])
    number = 0
    while True:
        number += 1
        with contextlib.suppress(grpc.aio.AioRpcError):
            stranger.request.worker_id = "again" if is_one else f"new-{number}"
            await stranger.register()
        await asyncio.sleep(seconds)


async def _report_for_ever(process: Process, draw: random.Random) -> None:
    """Up to as many as may report at the same time, and one more."""
    seconds = draw.choice([None, 1.0])
    count = draw.randint(1, process.world.limits.max_reports_at_once + 1)
    await asyncio.gather(*(_never_end(process, f"endless-{number}", seconds) for number in range(count)))


async def _never_end(process: Process, name: str, seconds: float | None) -> None:
    """`seconds` between two parts; None: after the first contents it says nothing more."""
    stranger = _Stranger(process, name)
    while True:
        try:
            await stranger.register()
            part, asked_at = 0, 0.0
            while True:
                if part < 2 or (seconds is not None and process.loop.time() - asked_at >= seconds):
                    asked_at = process.loop.time()
                    try:
                        await stranger.report(part)
                        part += 1
                    except grpc.aio.AioRpcError as error:
                        if error.code() is not grpc.StatusCode.UNAVAILABLE:
                            raise
                await stranger.keep_alive()
                await asyncio.sleep(0.1)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.1)


async def _hoard(process: Process, draw: random.Random) -> None:
    """More streams of Watch than there are places, each opened again as soon as it ends."""
    stub = cache_pb2_grpc.CacheServiceStub(process.world.manager_channel(process))
    request = cache_pb2.WatchRequest(picture=cache_pb2.PictureOptions(interval_ms=1000))

    async def hold() -> None:
        while True:
            call = stub.Watch(request)
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            await asyncio.sleep(0.05)

    await asyncio.gather(*(hold() for _ in range(MAX_WATCHERS + 2)))


class Viewer(ClientProcess):
    """Watches the cluster as `kvpool top` does."""

    shown_at = 0.0
    """When it last got something, in the kernel's time."""

    async def look_for_ever(self) -> None:
        """Follow, through every end of the stream."""
        options = cache_pb2.PictureOptions(interval_ms=1000, include_blocks=True, max_sequences=1)
        request = cache_pb2.WatchRequest(picture=options)
        async for update in Watch(self._channels, self._config, request).updates():
            if isinstance(update, ManagerAway):
                self.world.counts["viewers that were shown nothing"] += 1
            else:
                self.shown_at = self.kernel.now


_KINDS: dict[str, Callable[[Process, random.Random], Coroutine[Any, Any, None]]] = {
    "workers that register for ever": _register_for_ever,
    "reports that never end": _report_for_ever,
    "streams of Watch without end": _hoard,
}
BLACK_HOLE = "worker that hears nothing"
KINDS = (*_KINDS, BLACK_HOLE)


class Hole(NamedTuple):
    """Nothing that managers send reaches one worker."""

    worker: WorkerProcess
    began_at: float


class Strangers:
    """Those of one run, drawn from its seed; none in most."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._draw = world.kernel.random("strangers")
        self.kinds = [kind for kind in KINDS if self._draw.random() < 0.12]
        if world.leader_lease:
            # A simulated stream knows one manager.
            self.kinds = [kind for kind in self.kinds if kind != "streams of Watch without end"]
        self.viewer: Viewer | None = None
        self.hole: Hole | None = None
        self.healed_at: float | None = None
        """When the network had healed, and all clocks but those of processes that started before ran well."""

    def begin(self) -> None:
        for kind in self.kinds:
            self.world.counts[f"fault: {kind}"] += 1
            if kind == BLACK_HOLE:
                continue
            process = Process(self.world, kind, kind)
            self._spawn_later(process, partial(_KINDS[kind], process, self._draw))
            if _KINDS[kind] is _hoard:
                self.viewer = Viewer(self.world, "viewer")
                self._spawn_later(self.viewer, self.viewer.look_for_ever, first=10.0)

    def _spawn_later(
        self, process: Process, begin: Callable[[], Coroutine[Any, Any, None]], first: float = 0.0
    ) -> None:
        def spawn() -> None:
            process.spawn(begin())

        self.world.kernel.at(first + self._draw.uniform(0.0, 10.0), spawn)

    def on_healed(self) -> None:
        """From here on everybody else must get on."""
        world = self.world
        self.healed_at = world.kernel.now
        if set(self.kinds) - {BLACK_HOLE} and world.manager is not None:
            world.kernel.after(0.1, world.manager.crash)
        if BLACK_HOLE in self.kinds:
            world.kernel.after(self._draw.uniform(2.0, 4.0), self._open_hole)

    def _open_hole(self) -> None:
        world, ready = self.world, [one for one in self.world.live_workers() if one.cache.is_ready()]
        if not ready:
            return
        worker = self._draw.choice(ready)
        self.hole = Hole(worker, world.kernel.now)
        for machine in world.manager_machines:
            world.bus.cut(machine, worker.machine, HOLE_SECONDS)
        client = world.live_clients()[0]
        for number in range(round(HOLE_SECONDS / KEEP_ALIVE_SECONDS)):
            world.kernel.after(number * KEEP_ALIVE_SECONDS, client.look, "route", ("", [1, 2, 3, 4, 5]))

    def is_over(self) -> bool:
        """Whether nothing that begins with the healing is still to come."""
        wait = 5.0 if BLACK_HOLE in self.kinds else 0.5
        return not self.kinds or (self.healed_at is not None and self.world.kernel.now > self.healed_at + wait)
