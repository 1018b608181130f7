"""Addresses host:port, as gRPC and people write them."""

from __future__ import annotations

import errno
import ipaddress
import socket
from pathlib import Path
from typing import Final

DEFAULT_PORT: Final = 50051
"""Port of the manager."""
DEFAULT_MANAGER: Final = f"127.0.0.1:{DEFAULT_PORT}"
"""Address at which clients and workers look for the manager by default."""
EVERY_ADDRESS = frozenset({"0.0.0.0", "::", "[::]"})
"""Hosts to listen on that mean every address of the machine; no connection can be made to them."""
_FILE: Final = "file:"


class PortError(Exception):
    """An address cannot be listened on; the message says which, why, and what to choose instead."""


def join_host_port(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def reachable_host(host: str) -> str:
    """Return the host by which this machine reaches a server that listens on `host`, without brackets."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), host.strip("[]"))


def listen(host: str, port: int, *, flags: str = "--", backlog: int | None = None) -> socket.socket:
    """Make a socket that listens; port 0 takes any free one. Raises PortError, which names the flags with the prefix `flags`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=backlog)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            hint = f"choose another {flags}port; 0 takes any free one"
        else:
            hint = f"choose another {flags}host or {flags}port"
        why = (error.strerror or str(error)).partition(" (while")[0]
        raise PortError(f"cannot listen on {join_host_port(host, port)}: {why}; {hint}") from None


def with_default_port(address: str, port: int) -> str:
    """Return `address` as host:port; `port` is added if it names a host alone. Raises ValueError, which says what is wrong."""
    host, colon, given = address.rpartition(":")
    if address.count(":") > 1 and not address.startswith("["):
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            raise ValueError(f"needed host or host:port, got {address!r}") from None
    if not colon or address.endswith("]") or (":" in host and not host.startswith("[")):
        return join_host_port(address, port)
    if not host or not given.isdigit() or not 0 < int(given) < 65536:
        raise ValueError(f"needed host or host:port, got {address!r}")
    return address


def split_addresses(addresses: str) -> tuple[str, ...]:
    """Split "host:port,host:port". Raises ValueError, which says what is wrong."""
    parts = tuple(part.strip() for part in addresses.split(","))
    for part in parts:
        host, _, port = part.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536 or (":" in host and not host.startswith("[")):
            raise ValueError(f"needed host:port, or several of them with commas between, got {addresses!r}")
    return parts


def managers_file(managers: str) -> Path | None:
    """Return the path in "file:PATH"; None: `managers` are the addresses themselves."""
    return Path(managers.removeprefix(_FILE)).expanduser() if managers.startswith(_FILE) else None


def require_managers(managers: str) -> None:
    """Raise ValueError unless these are the managers of a cluster: "host:port", several of them with commas between, or
    "file:PATH" of a file that lists them. The file is not read: it may be written later."""
    if managers == _FILE:
        raise ValueError(f"needed the path of a file after {_FILE}")
    if managers_file(managers) is None:
        split_addresses(managers)


def manager_addresses(managers: str) -> tuple[str, ...]:
    """Return host:port of each manager at this moment. Empty while there is no file, or while it lists something else than
    addresses; its writer replaces it when a manager moves. Blocks on the disk."""
    file = managers_file(managers)
    if file is None:
        return split_addresses(managers)
    try:
        return split_addresses(",".join(file.read_text().replace(",", " ").split()))
    except (OSError, ValueError):
        return ()


def is_loopback(host: str) -> bool:
    """Whether `host` can only mean this machine. Names are not resolved: of them only localhost is."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
