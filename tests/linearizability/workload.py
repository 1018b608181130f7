"""Peers that speak to the manager all at once: workers whose calls overtake each other, and clients that ask for routes.

They are no honest engines: what they say is made from what they have heard, which may be old, and they do not keep to one call in
flight. The manager owes everybody an answer out of one order.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvpool.cache_service.settings import ManagerSettings
from kvpool.protocol.tokens import pack_tokens
from kvpool.v1 import cache_pb2, cache_pb2_grpc, common_pb2
from tests.cache_service.edge import peer
from tests.cache_service.edge.conftest import running
from tests.cache_service.edge.peer import ROOT, key, registration, run
from tests.linearizability.history import Operation
from tests.linearizability.proxy import Proxy, Weather
from tests.linearizability.specification import Specification

BLOCK_SIZE = 2
NUM_BLOCKS = 7
NUM_WORKERS = 3
NUM_SPEAKERS = 2
"""Tasks that speak for one worker at the same time."""
SHARED_IDS = ("a", "b")
"""Sequences that every worker asks for, in attempts that fence each other."""


@dataclass
class Known:
    """What a worker believes of one of its sequences."""

    key: common_pb2.SequenceKey
    tokens: list[int]
    num_entries: int
    num_computed: int


class Worker(peer.Worker):
    """One worker, for which several tasks speak."""

    def __init__(self, name: str, stub: cache_pb2_grpc.CacheServiceStub, seed: int) -> None:
        super().__init__(stub, registration(name, num_blocks=NUM_BLOCKS, register_no=0))
        self.request.kv_cache_config.block_size = BLOCK_SIZE
        self.random = random.Random(seed)
        self.sequences: dict[tuple[str, int], Known] = {}
        self.reserve: list[tuple[int, int]] = []
        self._registering = asyncio.Lock()

    async def speak(self, count: int) -> None:
        """Make `count` calls, one after the other."""
        for _ in range(count):
            session = self.session
            try:
                await self._say()
            except grpc.aio.AioRpcError as error:
                if "STALE_SESSION" in repr(error.trailing_metadata()) and self.session == session:
                    self.registered = cache_pb2.RegisterResponse()

    async def _say(self) -> None:
        dice = self.random.random()
        if not self.session or dice < 0.005:
            async with self._registering:
                if not self.session or dice < 0.005:
                    await self._register()
        elif dice < 0.01:
            request = cache_pb2.DeregisterRequest(session=self.session, session_key=self.session_key)
            self.registered = cache_pb2.RegisterResponse()
            await self.stub.Deregister(request)
        elif dice < 0.15:
            session = self.session
            self._take(session, (await self.keep_alive()).downlink)
        elif dice < 0.40 or not self.sequences:
            await self._allocate()
        elif dice < 0.75:
            await self._append()
        else:
            await self._free()

    # -- sessions

    async def _register(self) -> None:
        self.request.register_no += 1
        response = await self.stub.Register(self.request)
        if response.session > self.session:
            self.registered = response
            self.call_no = self.downlink_ack = 0
            self.sequences, self.reserve = {}, []

    def _take(self, session: int, downlink: cache_pb2.Downlink) -> None:
        if session != self.session:
            return
        for entry in downlink.entries:
            if entry.number > self.downlink_ack:
                self.downlink_ack = entry.number
                self.reserve += zip(entry.grant.block_ids, entry.grant.generations, strict=True)
                self.sequences.pop((entry.stop.sequence_id, entry.stop.attempt), None)

    # -- sequences

    def _uplink(self) -> cache_pb2.Uplink:
        if self.call_no and self.random.random() < 0.1:
            self.call_no -= 1  # the last call's number once more
        wish = self.random.randrange(3) if self.random.random() < 0.5 else None
        returned = []
        if self.reserve and self.random.random() < 0.2:
            block, generation = self.reserve.pop()
            returned.append(run(0, [block], [generation]))
        return self.uplink(wish, returned)

    async def _allocate(self) -> None:
        request = cache_pb2.AllocateRequest(uplink=self._uplink())
        prompts: list[list[int]] = []
        for _ in range(self.random.choice((1, 1, 2))):
            # Few texts, so that there are hits, waits and differences.
            tokens = [1, 2, 3, 4, 5, 6][: self.random.randrange(1, 7)]
            if self.random.random() < 0.3:
                tokens[-1] = 9
            prompts.append(tokens)
            is_shared = self.random.random() < 0.25
            name = (
                self.random.choice(SHARED_IDS) if is_shared else f"{self.request.worker_id}{self.random.randrange(4)}"
            )
            attempt = self.random.choice((1, 1, 2, 3)) if is_shared else 1
            request.items.add(
                key=key(name, attempt, self.random.choice((0, 0, 0, 0, 0, 1))),
                root=ROOT,
                tokens=pack_tokens(tokens),
                max_new_tokens=self.random.randrange(1, 4),
                no_wait=self.random.random() < 0.5,
            )
        session = self.session
        response = await self.stub.Allocate(request)
        self._take(session, response.downlink)
        for item, tokens, result in zip(request.items, prompts, response.results, strict=True):
            if session == self.session and result.HasField("granted"):
                num_entries, num_cached = len(result.granted.tables[0].block_ids), result.granted.num_cached_tokens
                known = Known(item.key, tokens, num_entries, num_cached)
                self.sequences[item.key.sequence_id, item.key.attempt] = known

    def _update(self, known: Known) -> cache_pb2.SequenceUpdate:
        """Some more tokens, some more of them computed, some more blocks out of the reserve."""
        start = self.random.randrange(len(known.tokens) + 1)
        if self.random.random() < 0.6:
            known.tokens = [*known.tokens, self.random.choice((7, 7, 8))]
        slots = known.num_entries * BLOCK_SIZE
        known.num_computed = max(known.num_computed, self.random.randrange(min(len(known.tokens), slots) + 1))
        update = cache_pb2.SequenceUpdate(
            key=known.key, start=start, tokens=pack_tokens(known.tokens[start:]), num_computed_tokens=known.num_computed
        )
        if self.reserve and slots < len(known.tokens):
            block, generation = self.reserve.pop(0)
            update.bound.append(run(known.num_entries, [block], [generation]))
            known.num_entries += 1
        return update

    async def _append(self) -> None:
        known = self.random.choice(list(self.sequences.values()))
        request = cache_pb2.AppendRequest(uplink=self._uplink())
        want = self.random.choice((0, 0, known.num_entries, known.num_entries + 1))
        request.items.add(update=self._update(known), want_blocks=want)
        session = self.session
        response = await self.stub.Append(request)
        self._take(session, response.downlink)
        if session == self.session and response.results[0].tables:
            run = response.results[0].tables[0]
            known.num_entries = max(known.num_entries, run.start_index + len(run.block_ids))

    async def _free(self) -> None:
        request = cache_pb2.FreeRequest(uplink=self._uplink())
        name = self.random.choice(list(self.sequences))
        request.items.add(update=self._update(self.sequences.pop(name)))
        session = self.session
        self._take(session, (await self.stub.Free(request)).downlink)


async def ask_for_routes(stub: cache_pb2_grpc.CacheServiceStub, count: int, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(count):
        request = cache_pb2.RouteRequest(root=ROOT, tokens=pack_tokens([1, 2, 3, 4, 5, 6, 7][: dice.randrange(1, 8)]))
        with contextlib.suppress(grpc.aio.AioRpcError):  # the answer was lost
            await stub.Route(request)


async def record(
    state_folder: Path, seed: int, *, num_calls: int = 20, weather: Weather | None = None
) -> tuple[list[Operation], Specification]:
    """Start a manager, let all speak to it through a proxy; returns what reached it, and the state that it began in.

    `num_calls`: by each speaker and each of two clients.
    """
    async with running(ManagerSettings(port=0, state_dir=state_folder, lease_seconds=600)) as server:
        start = Specification(server.manager.last_generation, server.manager._last_session)
        proxy = Proxy(server.port, weather or Weather(), seed)
        async with proxy, grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
            stub = cache_pb2_grpc.CacheServiceStub(channel)
            workers = [Worker(f"w{index}", stub, seed * 100 + index) for index in range(NUM_WORKERS)]
            await asyncio.gather(
                *(worker.speak(num_calls) for worker in workers for _ in range(NUM_SPEAKERS)),
                *(ask_for_routes(stub, num_calls, seed * 100 + 50 + index) for index in range(2)),
            )
    return proxy.history, start
