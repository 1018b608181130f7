"""A manager's process: the real core, servicer, epoch file or Lease, behind the simulated bus."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import Limits
from kvpool.cache_service.core.session_key import SessionKey
from kvpool.cache_service.election.epoch import EpochStore, LeadershipLost, StateError
from kvpool.cache_service.election.file import FileEpochs
from kvpool.cache_service.election.kubernetes import LeaseEpochs, LeaseName
from kvpool.cache_service.leader_gate import LeaderGate
from kvpool.cache_service.servicer import SESSION_KEY_BYTES, CacheServicer
from kvpool.v1 import cache_pb2_grpc
from tests.simulation import lease_server
from tests.simulation.disk import Path, PowerLoss
from tests.simulation.process import Process
from tests.simulation.rpc import Methods

if TYPE_CHECKING:
    from tests.simulation.world import World

MACHINES = ("manager", "manager2")
"""The second one only where they elect who leads."""
LEASE_SECONDS = 3.0
TICK_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 1.0
MAX_WATCHERS = 3


def address_of(machine: str) -> str:
    """At which the manager of a machine listens."""
    return f"{machine}:50051"


class ManagerProcess(Process):
    """One process of a manager, which leads from its start on, or stands by until it does."""

    core: CacheManager
    """Of the life in which it leads; not there before."""
    epochs: EpochStore
    servicer: CacheServicer
    """Of that life."""

    def __init__(self, world: World, machine: str, number: int, limits: Limits) -> None:
        super().__init__(world, f"{machine}.{number}", machine)
        self.is_stopping = False
        self.has_odd_clock = False
        """Its clock has jumped, or runs much faster or slower than others."""
        self._limits = limits
        self._keys = self.kernel.random(f"keys of {self.name}")

    def boot(self) -> None:
        self.world.bus.endpoints[address_of(self.machine)] = self
        if self.world.leader_lease:
            self._stand_by()
        else:
            self._lead_by_file()

    def change_clock(self, jump: float, rate: float) -> None:
        self.has_odd_clock = True
        super().change_clock(jump, rate)

    def leads(self) -> bool:
        """Whether it may answer calls, as it thinks."""
        return not self.is_dead and hasattr(self, "core") and self.epochs.leads()

    def _stand_by(self) -> None:
        epochs = LeaseEpochs(
            LeaseName("default", lease_server.LEASE),
            duration=self.world.leader_lease,
            api=lease_server.URL,
            clock=self.loop.clock.now,
            transport=lease_server.Connection(self.world.lease_server, self),
        )
        epochs.identity = self.name
        self.epochs = epochs
        gate = LeaderGate()
        self._listen(gate)
        self.kernel.trace(self.name, "stands by")
        self._leading = self.spawn(self._lead_by_lease(gate))

    async def _lead_by_lease(self, gate: LeaderGate) -> None:
        """As cache_service/server.py does. The end of its lead is its own end."""
        try:
            await self.epochs.lead()
            gate.leading = self._begin_life(self.epochs)
            self.loop.create_task(self._tick_for_ever())
            await self.epochs.keep()
        except (LeadershipLost, StateError) as end:
            self.kernel.trace(self.name, f"leads no more: {end}")
            if not self.is_stopping:
                self.world.counts["leads lost"] += 1
                self.loop.call_soon(self.crash)

    def stop(self) -> None:
        """It is told to stop, and lets another one lead first."""
        if not self.is_stopping:
            self.is_stopping = True
            self.spawn(self._stop())

    async def _stop(self) -> None:
        """As cache_service/server.py does."""
        if hasattr(self, "core"):
            self.servicer.refuse_calls()
        await self.epochs.release()
        await asyncio.sleep(0.1)
        self._leading.cancel()
        await asyncio.gather(self._leading, return_exceptions=True)
        self.loop.call_soon(self.crash)

    def _lead_by_file(self) -> None:
        """Read the epoch. Dies if the state file is damaged or the power goes meanwhile."""
        try:
            epochs = FileEpochs.open(Path(self.world.disk, ""))  # type: ignore[arg-type]
        except PowerLoss:
            self.crash(lost_power=True)
            return
        except StateError as error:
            self.kernel.trace(self.name, f"does not start: {error}")
            self.world.on_damaged_state(self)
            return
        self.epochs = epochs
        self._listen(self._begin_life(epochs))
        self.spawn(self._tick_for_ever())

    def _begin_life(self, epochs: EpochStore) -> CacheServicer:
        self.core = CacheManager(
            epochs.epoch,
            session_start=self._random.getrandbits(39),
            lease_seconds=LEASE_SECONDS,
            tick_seconds=TICK_SECONDS,
            limits=self._limits,
        )
        self.first_epoch = epochs.epoch
        self.kernel.trace(self.name, f"leads with epoch {epochs.epoch}")
        servicer = CacheServicer(
            self.core,
            epochs,
            keep_alive_seconds=KEEP_ALIVE_SECONDS,
            clock=self.loop.clock.now,
            make_key=self._make_key,
            max_watchers=MAX_WATCHERS,
        )
        self.servicer = servicer
        self.world.on_leading(self)
        return servicer

    def _listen(self, servicer: Any) -> None:
        methods = Methods()
        cache_pb2_grpc.add_CacheServiceServicer_to_server(servicer, methods)  # type: ignore[arg-type]
        self.handlers = methods.handlers

    def _make_key(self) -> SessionKey:
        return SessionKey(self._keys.randbytes(SESSION_KEY_BYTES))

    async def _tick_for_ever(self) -> None:
        """As cache_service/server.py does."""
        more = False
        while True:
            await asyncio.sleep(0 if more else TICK_SECONDS)
            until = self.loop.clock.now() + TICK_SECONDS
            expired = self.core.tick(self.loop.clock.now())
            for session in expired:
                self.kernel.trace(self.name, f"lease of {session.worker_id} has expired")
            if expired:
                self.world.counts["leases expired"] += len(expired)
            more = self.core.sweep()
            while more and self.loop.clock.now() < until:
                await asyncio.sleep(0.0005 if self.world.is_sweeping_slowly else 0)
                more = self.core.sweep()

    def on_death(self) -> None:
        self.world.on_manager_death(self)
