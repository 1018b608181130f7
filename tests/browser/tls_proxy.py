"""A proxy with TLS before a gateway, of this machine alone and with a certificate of its own."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

_HOST: Final = re.compile(rb"(?im)^host:[^\r\n]*")


@asynccontextmanager
async def tls_proxy(folder: Path, port: int, *, keeps_host: bool) -> AsyncIterator[str]:
    """Passes everything on to that port, an event as it comes; gives its own URL. Unless it keeps the Host, it names the gateway's
    address there, as some proxies do if they are not told otherwise."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*_certificate(folder))
    named = None if keeps_host else b"Host: 127.0.0.1:%d" % port
    passing: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        passing.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_pass(reader, behind_writer, named), _pass(behind_reader, writer, None))
        passing.discard(task)

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}"
        for task in passing:
            task.cancel()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: bytes | None) -> None:
    """What comes from one side goes to the other; a browser sends a head in one piece."""
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece if host is None else _HOST.sub(host, piece, count=1))
            await writer.drain()
    finally:
        writer.close()


def _certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    command = ["openssl", "req", *options.split(), "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
