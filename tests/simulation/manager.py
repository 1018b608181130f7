"""The manager's process: the real core, servicer and epoch file, behind the simulated bus."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import Limits
from kvpool.cache_service.core.session_key import SessionKey
from kvpool.cache_service.election.epoch import StateError
from kvpool.cache_service.election.file import FileEpochs
from kvpool.cache_service.keys import SESSION_KEY_BYTES
from kvpool.cache_service.servicer import CacheServicer
from kvpool.v1 import cache_pb2_grpc
from tests.simulation.disk import Path, PowerLoss
from tests.simulation.process import Process
from tests.simulation.rpc import Methods

if TYPE_CHECKING:
    from tests.simulation.world import World

ADDRESS = "manager:50051"
MACHINE = "manager"
LEASE_SECONDS = 3.0
TICK_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 1.0


class ManagerProcess(Process):
    """One life of the manager."""

    core: CacheManager

    def __init__(self, world: World, number: int, limits: Limits) -> None:
        super().__init__(world, f"manager.{number}", MACHINE)
        self.counted: Counter[Any] = Counter()
        """Cases of reconciliation that were added to the world's counts."""
        self._limits = limits
        self._keys = self.kernel.random(f"keys of {self.name}")

    def boot(self) -> None:
        """Read the epoch, and listen. Dies if the state file is damaged or the power goes meanwhile."""
        try:
            epochs = FileEpochs.open(Path(self.world.disk, ""))  # type: ignore[arg-type]
        except PowerLoss:
            self.crash(lost_power=True)
            return
        except StateError as error:
            self.kernel.trace(self.name, f"does not start: {error}")
            self.world.on_damaged_state(self)
            return
        self.core = CacheManager(
            epochs.epoch,
            session_start=self._random.getrandbits(39),
            lease_seconds=LEASE_SECONDS,
            tick_seconds=TICK_SECONDS,
            limits=self._limits,
        )
        self.first_epoch = epochs.epoch
        self.kernel.trace(self.name, f"listens with epoch {epochs.epoch}")
        self.servicer = CacheServicer(
            self.core,
            epochs,
            keep_alive_seconds=KEEP_ALIVE_SECONDS,
            clock=self.loop.clock.now,
            make_key=self._make_key,
        )
        methods = Methods()
        cache_pb2_grpc.add_CacheServiceServicer_to_server(self.servicer, methods)  # type: ignore[arg-type]
        self.handlers = methods.handlers
        self.world.bus.endpoints[ADDRESS] = self
        self.spawn(self._tick_for_ever())

    def _make_key(self) -> SessionKey:
        return SessionKey(self._keys.randbytes(SESSION_KEY_BYTES))

    async def _tick_for_ever(self) -> None:
        """As cache_service/server.py does."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            expired = self.core.tick(self.loop.clock.now())
            for session in expired:
                self.kernel.trace(self.name, f"lease of {session.worker_id} has expired")
            if expired:
                self.world.counts["leases expired"] += len(expired)
            more = self.core.sweep()
            while more:
                await asyncio.sleep(0.0005 if self.world.is_sweeping_slowly else 0)
                more = self.core.sweep()

    def on_death(self) -> None:
        self.world.on_manager_death()
