"""The gRPC channels and stubs of one client: one per address, made when first used."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from kvpool.process.channel_options import CHANNEL_OPTIONS
from kvpool.process.manager_channel import ManagerChannel
from kvpool.v1 import cache_pb2_grpc, worker_pb2, worker_pb2_grpc

from .answer_streams import Answers, AnswerStreams

MAX_CHANNELS: Final = 256


class _Peer:
    """The channel and the stub of one address. Making a stub registers all its methods, so it is made once."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.worker = worker_pb2_grpc.WorkerServiceStub(channel)


class Channels:
    """Channels by address. Use it, and close it, inside one running event loop."""

    def __init__(self) -> None:
        self._managers: dict[str, ManagerChannel] = {}
        """Channels by the manager's addresses as the settings write them."""
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self._answer_streams = AnswerStreams(lambda address: self.worker(address).GenerateMany)

    def __len__(self) -> int:
        return len(self._peers)

    def manager(self, addresses: str) -> cache_pb2_grpc.CacheServiceStub:
        """Return the stub of the manager at host:port, or of the one that leads if there are several. It connects when it is first
        called. Not encrypted."""
        channel = self._managers.get(addresses)
        if channel is None:
            channel = self._managers[addresses] = ManagerChannel(addresses)
        return channel.stub

    def worker(self, address: str) -> worker_pb2_grpc.WorkerServiceStub:
        """Return the stub of the worker at host:port. It connects when it is first called. Not encrypted."""
        return self._peer(address).worker

    def generate(self, address: str, request: worker_pb2.GenerateRequest) -> Answers:
        """Send a request to the worker at host:port, on the stream that its other requests share."""
        return self._answer_streams.begin(address, request)

    def health(self, address: str) -> Any:
        """Return the HealthStub (grpc.health.v1) of the service at host:port."""
        return health_pb2_grpc.HealthStub(self._peer(address).channel)

    def _peer(self, address: str) -> _Peer:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(self._open(address))
            self._bound()
        self._peers.move_to_end(address)
        return peer

    def _open(self, address: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    async def close(self) -> None:
        """Close all channels; calls that still run on them are cancelled. May be repeated."""
        await self._answer_streams.close()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        while self._managers:
            await self._managers.popitem()[1].aclose()
        while self._peers:
            await self._peers.popitem()[1].channel.close()

    def _bound(self) -> None:
        # Restarted workers come back on other ports: without a bound a long-lived client would collect dead channels.
        while len(self._peers) > MAX_CHANNELS:
            _, oldest = self._peers.popitem(last=False)
            task = asyncio.get_running_loop().create_task(oldest.channel.close(grace=600.0))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
