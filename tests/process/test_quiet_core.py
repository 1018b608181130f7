"""What gRPC's C core writes to stderr of a peer's headers."""

from __future__ import annotations

import pytest

from tests.python_program import run_python

SERVE = """
import asyncio
{first}
import grpc.aio
from tests import http2

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with await http2.Connection.open(port) as connection:
        fields = [(b":method", b"GOT"), (b":scheme", b"http"), (b":path", b"/x"), (b"content-type", b"application/grpc")]
        await connection.send(http2.headers(b"".join(http2.literal(*field) for field in fields), 1, 5))
        while (frame := await connection.read()) is not None and frame.kind not in (http2.Kind.HEADERS, http2.Kind.RST_STREAM):
            pass
    await server.stop(0)

asyncio.run(main())
"""


@pytest.mark.parametrize(("first", "is_quiet"), [("", False), ("import kvpool.process.quiet_core", True)])
def test_a_peer_s_headers_write_nothing_into_the_log_of_a_service(first: str, is_quiet: bool) -> None:
    """Without it there is a line for each of them: should gRPC stop that, the module can go."""
    done = run_python("-c", SERVE.format(first=first))
    assert done.returncode == 0, done.stderr
    assert ("hpack_parser" not in done.stderr) is is_quiet, done.stderr
