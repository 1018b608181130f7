"""A raw HTTP/2 client for tests: what no gRPC library sends. Frames by RFC 9113, header fields as literals without indexing."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Final, NamedTuple, Self

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA: Final = 0x0
HEADERS: Final = 0x1
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
INITIAL_WINDOW_SIZE: Final = 0x4
"""Of SETTINGS: bytes of DATA that the peer may send on each stream before a WINDOW_UPDATE."""
METHOD_POST_AND_SCHEME_HTTP: Final = b"\x83\x86"
"""Entries 3 and 6 of HPACK's static table."""

Fields = Iterable[tuple[bytes, bytes]]


class Frame(NamedTuple):
    """One frame as it came."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """The bytes of one frame; `payload` is under 16 MiB."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def settings(values: Mapping[int, int]) -> bytes:
    """The payload of a SETTINGS frame."""
    return b"".join(struct.pack(">HI", name, value) for name, value in values.items())


def literal(name: bytes, value: bytes) -> bytes:
    """A header field that is put into no table."""
    return b"\x00" + _string(name) + _string(value)


def grpc_headers(path: bytes, fields: Fields = ()) -> bytes:
    """The header block of a gRPC request. `path` is sent as it is, `fields` come last."""
    usual = ((b":path", path), (b":authority", b"test"), (b"te", b"trailers"), (b"content-type", b"application/grpc"))
    return METHOD_POST_AND_SCHEME_HTTP + b"".join(literal(name, value) for name, value in (*usual, *fields))


def grpc_message(message: bytes) -> bytes:
    """A message as gRPC puts it into DATA: uncompressed, led by its length."""
    return struct.pack(">BI", 0, len(message)) + message


def _string(data: bytes) -> bytes:
    """A string literal of HPACK without Huffman coding; the length is an integer with a prefix of 7 bits."""
    if len(data) < 0x7F:
        return bytes((len(data),)) + data
    rest = len(data) - 0x7F
    length = bytearray((0x7F,))
    while rest >= 0x80:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    length.append(rest)
    return bytes(length) + data


class Connection:
    """One connection. `async with Connection.open(port) as connection` sends preface and SETTINGS, and closes it in the end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next_stream = 1

    @classmethod
    async def open(cls, port: int, host: str = "127.0.0.1", own_settings: Mapping[int, int] | None = None) -> Self:
        """Connect, and send preface and SETTINGS."""
        connection = cls(*await asyncio.open_connection(host, port))
        await connection.send(PREFACE + frame(SETTINGS, 0, 0, settings(own_settings or {})))
        return connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.transport.abort()

    async def send(self, data: bytes) -> None:
        """Write bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def request(self, path: bytes, message: bytes | None = None, fields: Fields = ()) -> int:
        """Send a request and return its stream. Without a message the stream ends with the headers."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        ends = END_STREAM if message is None else 0
        await self.send(frame(HEADERS, END_HEADERS | ends, stream, grpc_headers(path, fields)))
        if message is not None:
            await self.send(frame(DATA, END_STREAM, stream, grpc_message(message)))
        return stream

    async def read(self, *, answer: bool = True) -> Frame | None:
        """The next frame; None when the peer has closed the connection. SETTINGS and PING are acknowledged if `answer`."""
        try:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3]))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        found = Frame(head[3], head[4], int.from_bytes(head[5:]) & 0x7FFFFFFF, payload)
        with contextlib.suppress(ConnectionError):  # it may have been the peer's last frame
            if answer and found.kind == SETTINGS and not found.flags & ACK:
                await self.send(frame(SETTINGS, ACK, 0))
            elif answer and found.kind == PING and not found.flags & ACK:
                await self.send(frame(PING, ACK, 0, found.payload))
        return found

    async def open_window(self, size: int, stream: int) -> None:
        """Let the peer send `size` more bytes of DATA on the stream."""
        await self.send(frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size)))
