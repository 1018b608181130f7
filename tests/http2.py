"""HTTP/2 written by hand, for tests that send what no library would: frames, literal headers, one connection."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple, Self

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

Header = tuple[bytes, bytes]


class Kind(IntEnum):
    """Frame types of RFC 9113."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flag(IntFlag):
    """Those of the frames above; ACK and END_STREAM share a bit."""

    NONE = 0
    END_STREAM = 1
    ACK = 1
    END_HEADERS = 4
    PADDED = 8
    PRIORITY = 32


class Setting(IntEnum):
    """Identifiers in a SETTINGS frame, those that tests send."""

    ENABLE_PUSH = 2
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5


class Frame(NamedTuple):
    """One frame as it was read. `kind` is a Kind where RFC 9113 knows it."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """The bytes of a frame; `length`: what it claims to be, if that is not the truth."""
    claimed = len(payload) if length is None else length
    return claimed.to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def settings(values: Iterable[tuple[int, int]] = ()) -> bytes:
    return frame(Kind.SETTINGS, payload=b"".join(struct.pack(">HI", *value) for value in values))


def literal(name: bytes, value: bytes) -> bytes:
    """A header as HPACK has it: literal, new name, not indexed, no Huffman code."""
    return b"\x00" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    return _integer(len(text)) + text


def _integer(value: int) -> bytes:
    """With a prefix of 7 bits."""
    if value < 127:
        return bytes([value])
    encoded = bytearray([127])
    value -= 127
    while value >= 128:
        encoded.append(value % 128 + 128)
        value //= 128
    encoded.append(value)
    return bytes(encoded)


def request_headers(path: bytes, *, authority: bytes = b"localhost", further: Iterable[Header] = ()) -> bytes:
    """The header block of a gRPC call."""
    call = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", authority)]
    call += [(b"te", b"trailers"), (b"content-type", b"application/grpc"), *further]
    return b"".join(literal(*header) for header in call)


def headers(block: bytes, stream: int = 1, flags: int = Flag.END_HEADERS) -> bytes:
    return frame(Kind.HEADERS, flags, stream, block)


def data(payload: bytes, stream: int = 1, flags: int = Flag.END_STREAM) -> bytes:
    """A DATA frame; ends the stream unless `flags` say otherwise. At most 16 KiB of payload."""
    return frame(Kind.DATA, flags, stream, payload)


def message(payload: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    """A gRPC message, to be sent as data; `length`: what it claims to be, if that is not the truth."""
    return struct.pack(">BI", compressed, len(payload) if length is None else length) + payload


def call(path: bytes, payload: bytes, stream: int = 1, further: Iterable[Header] = ()) -> bytes:
    """A whole unary request of at most 16 KiB."""
    return headers(request_headers(path, further=further), stream) + data(message(payload), stream)


def reset(stream: int, error: int = 8) -> bytes:
    """A RST_STREAM frame; 8 is CANCEL."""
    return frame(Kind.RST_STREAM, 0, stream, struct.pack(">I", error))


def window_update(increment: int, stream: int = 0) -> bytes:
    return frame(Kind.WINDOW_UPDATE, 0, stream, struct.pack(">I", increment))


class Connection:
    """A TCP connection that sends what it is given. What the peer does to it (reset, close) is no error here."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next_stream = 1

    @classmethod
    async def connect(cls, address: str, seconds: float = 10.0) -> Self:
        """`address` is host:port. Raises OSError or TimeoutError if nothing listens there."""
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(seconds):
            return cls(*await asyncio.open_connection(host, int(port)))

    @classmethod
    async def open(cls, port: int, own_settings: Mapping[int, int] | None = None) -> Self:
        """Connect to a port of this machine, and send preface and SETTINGS."""
        connection = await cls.connect(f"127.0.0.1:{port}")
        await connection.start(*(own_settings or {}).items())
        return connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(self, *parts: bytes, seconds: float = 10.0) -> bool:
        """Whether the peer has taken it within the time."""
        try:
            self._writer.write(b"".join(parts))
            async with asyncio.timeout(seconds):
                await self._writer.drain()
        except (OSError, TimeoutError):
            return False
        return True

    async def start(self, *values: tuple[int, int]) -> bool:
        """The preface and SETTINGS with these values."""
        return await self.send(PREFACE, settings(values))

    async def read_frame(self, seconds: float = 10.0) -> Frame | None:
        """The next frame; None if the connection has ended, or nothing came in time."""
        try:
            async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return None
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        return Frame(kind, flags, stream & 0x7FFFFFFF, payload)

    async def request(self, path: bytes, payload: bytes | None = None) -> int:
        """Send a request and return its stream. Without a payload the stream ends with the headers."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        if payload is None:
            flags = Flag.END_HEADERS | Flag.END_STREAM
            await self.send(headers(request_headers(path), stream, flags))
        else:
            await self.send(call(path, payload, stream))
        return stream

    async def read(self, *, answer: bool = True) -> Frame | None:
        """The next frame; None when the peer has closed the connection. SETTINGS and PING are acknowledged if `answer`."""
        found = await self.read_frame(seconds=math.inf)
        if answer and found is not None and not found.flags & Flag.ACK:
            if found.kind == Kind.SETTINGS:
                await self.send(frame(Kind.SETTINGS, Flag.ACK))
            elif found.kind == Kind.PING:
                await self.send(frame(Kind.PING, Flag.ACK, 0, found.payload))
        return found

    async def answered(self, streams: set[int]) -> list[Frame]:
        """The HEADERS with which each of these streams is answered. AssertionError if the connection ends before."""
        answers: list[Frame] = []
        while {answer.stream for answer in answers} != streams:
            found = await self.read()
            assert found is not None
            answers += [found] if found.kind == Kind.HEADERS else []
        return answers

    async def open_window(self, size: int, stream: int) -> None:
        """Let the peer send `size` more bytes of DATA on the stream."""
        await self.send(window_update(size, stream))

    async def read_until_end(self, seconds: float) -> bool:
        """Whether the peer has closed the connection within the time; what it sends is thrown away."""
        try:
            async with asyncio.timeout(seconds):
                while await self._reader.read(1 << 16):
                    pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    async def close(self) -> None:
        """At once: what was not sent yet is lost."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
