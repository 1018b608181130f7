"""The letters in which a byte-level vocabulary writes bytes.

A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.2, and its published encoder.
"""

from __future__ import annotations

from functools import cache


@cache
def byte_letters() -> tuple[str, ...]:
    """Return the letter of each byte: printable Latin-1 stands for itself, the other bytes are U+0100 and up, in order."""
    others = iter(range(0x100, 0x200))
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


@cache
def _bytes() -> dict[str, int]:
    return {letter: byte for byte, letter in enumerate(byte_letters())}


def spelled_bytes(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary. A token with a letter that stands for no byte is text."""
    try:
        return bytes(map(_bytes().__getitem__, token))
    except KeyError:
        return token.encode()
