"""A channel to the manager that leads, for clusters in which several may.

With one address this is a plain channel. With several, listed or of one name, gRPC connects to all of them and watches the health
of CacheService at each (client-side health checking, gRFC A17). A call goes to the manager that serves; a call that may wait is
sent as soon as one does. Names are resolved here, because gRPC does not resolve lists. A file that lists the managers is read for
each channel, so that managers may move."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, cast

import grpc
import grpc.aio

from kvpool.v1 import cache_pb2, cache_pb2_grpc

from .address import is_loopback, join_host_port, manager_addresses, managers_file
from .call_status import details_of
from .channel_options import CHANNEL_OPTIONS

_SERVICE: Final = cache_pb2.DESCRIPTOR.services_by_name["CacheService"]
_TO_THE_LEADER: Final = (
    (
        "grpc.service_config",
        json.dumps(
            {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": _SERVICE.full_name}}
        ),
    ),
    ("grpc.service_config_disable_resolution", 1),
    # A new channel shall have new connections, and not share those of the one that it replaces.
    ("grpc.use_local_subchannel_pool", 1),
)
RENEW_SECONDS: Final = 0.5
"""Shortest time between two channels."""
RESOLVE_SECONDS: Final = 1.0
"""Time for resolving one name."""
_NOWHERE: Final = "127.0.0.1:0"
"""A target that refuses every connection at once, for a file that lists no manager yet."""
CLOSE_SECONDS: Final = 2.0
"""Time for the calls on a replaced channel to end."""


class ManagerChannel:
    """A channel that is opened when it is first used. Use it, and close it, inside one running event loop.

    `stub` has the methods of a CacheServiceStub. Each call goes over the present channel.
    """

    def __init__(self, managers: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._managers = managers
        self._clock = clock
        self._channel: grpc.aio.Channel | None = None
        self._opening = asyncio.Lock()
        self._opened_at = 0.0
        self._closing: set[asyncio.Task[None]] = set()
        self._stub: cache_pb2_grpc.CacheServiceStub | None = None
        self.stub = _leader_stub(self)

    async def present(self) -> cache_pb2_grpc.CacheServiceStub:
        """Return the stub of the present channel, which may be another one after a failure."""
        async with self._opening:
            if self._channel is None or self._stub is None:
                target, options = await _target(self._managers)
                self._channel = grpc.aio.insecure_channel(target, options=(*CHANNEL_OPTIONS, *options))
                self._stub = cache_pb2_grpc.CacheServiceStub(self._channel)
                self._opened_at = self._clock()
            return self._stub

    def on_failure(self, error: grpc.aio.AioRpcError) -> None:
        """Note that a call has failed. If no manager may have led, the next call gets a new channel: names may resolve to other
        machines now, and a frozen process keeps its connections and its last health status."""
        if self._channel is None or self._clock() - self._opened_at < RENEW_SECONDS:
            return
        if not is_single(self._managers) and is_of_no_leader(error):
            channel, self._channel = self._channel, None
            task = asyncio.get_running_loop().create_task(channel.close(CLOSE_SECONDS))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Close the channel and cancel the calls that still run on it. May be repeated."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


def _leader_stub(channel: ManagerChannel) -> cache_pb2_grpc.CacheServiceStub:
    """Return a table of the stub's methods; each call goes over the present channel."""

    async def call(method: str, request: Any, **options: Any) -> Any:
        stub = await channel.present()
        try:
            return await getattr(stub, method)(request, **options)
        except grpc.aio.AioRpcError as error:
            channel.on_failure(error)
            raise

    methods: dict[str, Any] = {method.name: partial(call, method.name) for method in _SERVICE.methods}
    methods["Watch"] = lambda request, **options: _LeaderStream(channel, request, options)
    return cast(cache_pb2_grpc.CacheServiceStub, SimpleNamespace(**methods))


class _LeaderStream:
    """A call of Watch, with the methods of a UnaryStreamCall that are used. It begins with the first `read`."""

    def __init__(self, channel: ManagerChannel, request: Any, options: Any) -> None:
        self._channel = channel
        self._request = request
        self._options = options
        self._call: Any = None

    async def read(self) -> Any:
        try:
            if self._call is None:
                self._call = (await self._channel.present()).Watch(self._request, **self._options)
            return await self._call.read()
        except grpc.aio.AioRpcError as error:
            self._channel.on_failure(error)
            raise

    def cancel(self) -> bool:
        return self._call is not None and bool(self._call.cancel())


def is_single(managers: str) -> bool:
    """Whether `managers` can mean only one process: it is one IP address, or localhost, with a port."""
    if managers_file(managers) is not None:
        return False  # tomorrow it lists another one
    addresses = manager_addresses(managers)
    if len(addresses) > 1:
        return False
    host = addresses[0].rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return is_loopback(host)
    return True


def is_of_no_leader(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call may have failed because no manager led."""
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return True
    return code is grpc.StatusCode.UNAVAILABLE and details_of(error).reason in ("", "STANDBY")


async def _target(managers: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """Return the target of a channel, and its options."""
    if is_single(managers):
        return managers, ()
    loop = asyncio.get_running_loop()
    by_family: dict[int, dict[str, None]] = {socket.AF_INET: {}, socket.AF_INET6: {}}
    addresses = await asyncio.to_thread(manager_addresses, managers)
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                answers = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, TimeoutError):
            continue  # the others may do
        for family, _, _, _, (ip, *_) in answers:
            if family in by_family:
                by_family[family][join_host_port(str(ip), int(port))] = None
    # One family only: a target has one, and a machine with two addresses is one manager.
    scheme, targets = (
        ("ipv4", by_family[socket.AF_INET]) if by_family[socket.AF_INET] else ("ipv6", by_family[socket.AF_INET6])
    )
    if len(targets) > 1:
        return f"{scheme}:{','.join(targets)}", _TO_THE_LEADER
    return next(iter(targets), next(iter(addresses), _NOWHERE)), ()
