"""What a connection can begin with that no HTTP/2 client sends: each case makes the bytes of one connection."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from tests import http2
from tests.http2 import Flag, Kind

PATH: Final = b"/kvpool.v1.CacheService/Describe"
_OPENING: Final = http2.PREFACE + http2.settings()

Case = Callable[[random.Random], bytes]


def _with_path(path: bytes) -> bytes:
    return _OPENING + http2.call(path, b"")


def _with_block(block: bytes, flags: int = Flag.END_HEADERS | Flag.END_STREAM) -> bytes:
    return _OPENING + http2.headers(block, flags=flags)


def path_not_utf8(draw: random.Random) -> bytes:
    """The defect of grpcio 1.85.1: such a path ends the server's main loop."""
    strange = draw.choice((b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", draw.randbytes(9) + b"\xfe"))
    return _with_path(draw.choice((b"/", PATH, b"/kvpool.v1.CacheService/")) + strange)


def strange_path(draw: random.Random) -> bytes:
    """Paths that name nothing."""
    nowhere = (b"", b"/", b"//", b"*", b"Describe", b"/" * 3000, b"/a/../b", b"/\x00", b"/%ff")
    paths = (*nowhere, PATH + b"/", PATH + b"?x=1", PATH[:-1])
    return _with_path(draw.choice(paths))


def strange_header(draw: random.Random) -> bytes:
    """Headers whose names or values no HTTP/2 peer may send."""
    further = (
        (b"Upper-Case", b"x"),
        (b"connection", b"close"),
        (b"x\x00y", b"z"),
        (b"x", b"a\r\nb: c"),
        (b"x", b"\xff\xfe"),
        (b"", b"x"),
        (b":path", b"/second"),
        (b":unknown", b"x"),
        (b"x-bin", b"!!not base64!!"),
        (b"grpc-timeout", b"99999999999H"),
        (b"grpc-timeout", b"-1S"),
        (b"grpc-timeout", b"\xff"),
        (b"grpc-encoding", b"nothing"),
        (b"content-length", b"18446744073709551616"),
        (b"host", b"\xff"),
        (b"grpc-status-details-bin", b"AAAA"),
        (b"x", b"y" * 9000),
    )
    return _OPENING + http2.call(PATH, b"", further=[draw.choice(further)])


def headers_missing(draw: random.Random) -> bytes:
    """A call without some of what a call needs."""
    needed = [
        (b":method", draw.choice((b"POST", b"GET", b"\xff", b""))),
        (b":scheme", b"http"),
        (b":path", PATH),
        (b":authority", draw.choice((b"localhost", b"\xff\xfe", b""))),
        (b"te", b"trailers"),
        (b"content-type", draw.choice((b"application/grpc", b"text/html", b"\xff"))),
    ]
    draw.shuffle(needed)
    block = b"".join(http2.literal(*header) for header in needed[: draw.randrange(len(needed) + 1)])
    return _with_block(block)


def bad_hpack(draw: random.Random) -> bytes:
    """Header blocks that cannot be decoded."""
    blocks = (
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # an index that is no number
        b"\xfe",  # an index into an empty table
        b"\x80",  # index 0
        b"\x3f\xff\xff\xff\xff\x0f",  # a table of gigabytes
        b"\x00\x7f\xff\xff\xff\x7f",  # a name of gigabytes
        b"\x00\x83\xff\xff\xff\x01x",  # the end-of-string code of Huffman
        b"\x00\x05ab",  # cut off
        b"\x40" + http2.literal(b"a", b"b" * 5000)[1:] * 3,  # more than the table holds
        draw.randbytes(draw.randint(1, 300)),
    )
    return _with_block(http2.request_headers(PATH) + draw.choice(blocks))


def bad_preface(draw: random.Random) -> bytes:
    """Other protocols, and none."""
    return draw.choice(
        (
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"POST / HTTP/1.0\r\nContent-Length: 99999999999\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(500),  # TLS
            b"\x00" * 64,
            http2.PREFACE[: draw.randrange(len(http2.PREFACE))],
            http2.PREFACE.replace(b"SM", b"XX"),
            http2.PREFACE + http2.call(PATH, b""),  # no SETTINGS
            draw.randbytes(draw.randint(0, 600)),
        )
    )


def bad_frame(draw: random.Random) -> bytes:
    """Frames of a wrong kind, size, stream or order."""
    block = http2.request_headers(PATH)
    frames = (
        http2.frame(Kind.DATA, 0, 0, b"x"),
        http2.frame(Kind.DATA, 0, 7, b"x"),
        http2.frame(Kind.HEADERS, Flag.END_HEADERS, 0, block),
        http2.frame(Kind.HEADERS, Flag.END_HEADERS, 2, block),
        http2.frame(Kind.HEADERS, Flag.END_HEADERS | Flag.PADDED, 1, b"\xff" + block),
        http2.frame(Kind.HEADERS, Flag.END_HEADERS | Flag.PRIORITY, 1, b"\x00"),
        http2.frame(Kind.CONTINUATION, Flag.END_HEADERS, 1, block),
        http2.frame(Kind.HEADERS, 0, 1, block) + http2.frame(Kind.PING, 0, 0, b"\x00" * 8),
        http2.frame(Kind.HEADERS, 0, 1, block) + http2.frame(Kind.CONTINUATION, 0, 3, block),
        http2.frame(Kind.PUSH_PROMISE, Flag.END_HEADERS, 1, b"\x00\x00\x00\x02" + block),
        http2.frame(Kind.PING, 0, 0, b"\x00" * 7),
        http2.frame(Kind.PING, 0, 3, b"\x00" * 8),
        http2.frame(Kind.RST_STREAM, 0, 0, b"\x00" * 4),
        http2.frame(Kind.RST_STREAM, 0, 9, b"\x00" * 4),
        http2.frame(Kind.PRIORITY, 0, 1, b"\x00\x00\x00\x01\x00"),
        http2.frame(Kind.GOAWAY, 0, 0, b"\x00"),
        http2.frame(Kind.SETTINGS, 0, 0, b"\x00" * 5),
        http2.frame(Kind.SETTINGS, Flag.ACK, 0, b"\x00" * 6),
        http2.frame(Kind.SETTINGS, 0, 1, b""),
        http2.settings([(http2.Setting.INITIAL_WINDOW_SIZE, (1 << 32) - 1)]),
        http2.settings([(http2.Setting.MAX_FRAME_SIZE, 1)]),
        http2.settings([(http2.Setting.ENABLE_PUSH, 7)]),
        http2.settings([(77, 1)] * 2000),
        http2.window_update(0),
        http2.window_update((1 << 31) - 1) * 2,
        http2.frame(99, 255, (1 << 32) - 1, b"?" * 40),
        http2.frame(Kind.DATA, 0, 1, b"x" * 100, length=(1 << 24) - 1),
        http2.frame(Kind.HEADERS, Flag.END_HEADERS, 1, block[:20], length=len(block)),
        http2.headers(block) + http2.data(b"") + http2.data(b"late"),
        http2.headers(block) + http2.headers(block),
        http2.headers(block) + http2.reset(1) + http2.data(b"late"),
    )
    return _OPENING + draw.choice(frames)


def bad_message(draw: random.Random) -> bytes:
    """A call in order whose gRPC message is not."""
    messages = (
        http2.message(b"", length=(1 << 32) - 1),
        http2.message(b"", length=15 << 20),
        http2.message(b"x", compressed=1),
        http2.message(b"x", compressed=255),
        http2.message(b"abc", length=2),
        http2.message(b"") + http2.message(b""),
        b"\x00\x00",
        b"",
        draw.randbytes(draw.randint(1, 500)),
    )
    return _OPENING + http2.headers(http2.request_headers(PATH)) + http2.data(draw.choice(messages))


def noise_in_a_call(draw: random.Random) -> bytes:
    """A call in order with some of its bytes changed."""
    sound = bytearray(_OPENING + http2.call(PATH, b"\x0a\x01x"))
    for _ in range(draw.randint(1, 8)):
        sound[draw.randrange(len(http2.PREFACE), len(sound))] = draw.randrange(256)
    return bytes(sound)


CASES: Final[tuple[Case, ...]] = (
    path_not_utf8,
    strange_path,
    strange_header,
    headers_missing,
    bad_hpack,
    bad_preface,
    bad_frame,
    bad_message,
    noise_in_a_call,
)
