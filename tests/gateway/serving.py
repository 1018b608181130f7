"""A gateway that listens, in the test's own process."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from kvpool.gateway.server import GatewayServer
from kvpool.gateway.settings import GatewaySettings

NOBODY = "127.0.0.1:1"
"""Where no manager is."""
_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""A client reads those of all authorities, which takes longer than most tests here."""


def http_client(base_url: str, **options: Any) -> httpx.AsyncClient:
    """Of a gateway without TLS."""
    return httpx.AsyncClient(base_url=base_url, verify=_NO_CERTIFICATES, **options)


@asynccontextmanager
async def serving(manager: str = NOBODY, **settings: Any) -> AsyncIterator[GatewayServer]:
    """Serve on a free port of the loopback."""
    chosen = {"manager": manager, "port": 0, "grace_seconds": 0, **settings}
    async with GatewayServer(GatewaySettings(**chosen)) as server:
        yield server


@asynccontextmanager
async def calling(manager: str = NOBODY, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A caller of a gateway with these settings."""
    async with serving(manager, **settings) as server, http_client(server.url) as client:
        yield client


def head(line: str, *fields: str) -> bytes:
    """The head of a request of HTTP/1.1, whose line is given without its version."""
    return "\r\n".join([f"{line} HTTP/1.1", "Host: localhost", *fields, "", ""]).encode()


def completion(**fields: Any) -> bytes:
    """A whole request for a completion."""
    body = json.dumps(fields).encode()
    return head("POST /v1/completions", f"Content-Length: {len(body)}") + body


async def exchange(port: int, raw: bytes, seconds: float = 20) -> bytes:
    """Send bytes as they are; returns what comes back until the gateway closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        async with asyncio.timeout(seconds):
            return await reader.read()
    finally:
        writer.close()
