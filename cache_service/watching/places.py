"""Shares the places for streams of Watch, first among hosts, then among the connections of a host.

No peer proves what it is, so no place can be kept for a gateway by name. Instead a place is taken from the peer that has most of
them. A gateway, and each `Client.watch`, is a connection with a stream or two, so it finds a place next to any number of streams
of another peer. A host is an address without its port; of an IPv6 address only the network of 64 bits counts. All peers that come
through a proxy are one host, or even one connection.

| all places are taken, and | the new stream takes the place of |
|---|---|
| a host has two more than the new one's host | that host's newest stream, of its connection with the most |
| else: a connection of the new one's host has two more than the new one's | that connection's newest stream |
| else | the oldest stream of those hosts and connections that have no fewer, if it is older than TURN_SECONDS |
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from ..core.refusal import Reason, Refusal

TURN_SECONDS: Final = 10.0
"""Time for which a stream keeps its place next to others that have no more than it."""


class StreamPlace(NamedTuple):
    """The place of one stream. `number` makes it different from all others."""

    number: int
    host: str
    connection: str
    since: float
    end: Callable[[Refusal], None]


class Places:
    """The places of one manager. Times are monotonic seconds."""

    def __init__(self, max_places: int) -> None:
        self.max_places = max_places
        self._taken: list[StreamPlace] = []
        """Places in use, oldest first."""
        self._num_given = 0

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, peer: str, now: float, end: Callable[[Refusal], None]) -> StreamPlace:
        """Take a place for a stream of this peer. `end` is called, with the reason, if another stream takes the place. Raises
        Refusal: TOO_MANY_WATCHERS."""
        host = host_of(peer)
        if len(self._taken) >= self.max_places:
            self._make_room(host, peer, now)
        self._num_given += 1
        place = StreamPlace(self._num_given, host, peer, now, end)
        self._taken.append(place)
        return place

    def leave(self, place: StreamPlace) -> None:
        """Give back the place of a stream that has ended. Idempotent."""
        if place in self._taken:
            self._taken.remove(place)

    def _make_room(self, host: str, connection: str, now: float) -> None:
        hosts = Counter(place.host for place in self._taken)
        connections = Counter(place.connection for place in self._taken)
        most = max(hosts.values(), default=0)
        if most >= hosts[host] + 2:
            of_host = [place for place in self._taken if hosts[place.host] == most]
            top = max(connections[place.connection] for place in of_host)
            self._end(next(place for place in reversed(of_host) if connections[place.connection] == top))
            return
        of_host = [place for place in self._taken if place.host == host]
        top = max((connections[place.connection] for place in of_host), default=0)
        if top >= connections[connection] + 2:
            self._end(next(place for place in reversed(of_host) if connections[place.connection] == top))
            return
        equals = [
            place
            for place in self._taken
            if hosts[place.host] > hosts[host]
            or (place.host == host and connections[place.connection] >= connections[connection])
        ]
        oldest = next(iter(equals), None)
        if oldest is None or now < oldest.since + TURN_SECONDS:
            wait = TURN_SECONDS if oldest is None else oldest.since + TURN_SECONDS - now
            raise Refusal(
                Reason.TOO_MANY_WATCHERS,
                f"{len(self._taken)} streams of Watch are open, the limit (--max-watchers), and no peer has more than its share: "
                "end one, or watch through a gateway, which has one for all its pages",
                retry_seconds=wait,
            )
        self._end(oldest)

    def _end(self, place: StreamPlace) -> None:
        self._taken.remove(place)
        place.end(
            Refusal(
                Reason.TOO_MANY_WATCHERS,
                f"this stream has given its place to another one: all {self.max_places} were taken (--max-watchers), and its peer "
                "has more than others, or it is the oldest; watch again",
            )
        )


def host_of(peer: str) -> str:
    """Return the host of a peer that is written as gRPC does: `ipv4:127.0.0.1:40123`, `ipv6:%5B::1%5D:40123`. All peers of another
    kind are one host for each kind."""
    kind, _, rest = peer.partition(":")
    address = rest.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D").strip("[]").partition("%")[0]
    if kind == "ipv6":
        try:
            ip = ipaddress.IPv6Address(address)
        except ValueError:
            return kind
        return str(ip.ipv4_mapped or ipaddress.IPv6Network((ip, 64), strict=False))
    return address or kind
