"""Token ids in a message, as little-endian uint32, and the digest of an encoder's input."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

TOKEN_BYTES: Final = 4


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Pack the ids in order, TOKEN_BYTES each. Raises OverflowError for one that is not a uint32."""
    packed = array("I", token_ids)
    if packed.itemsize != TOKEN_BYTES:  # pragma: no cover - no such platform is known to run CPython 3.11
        raise RuntimeError("array('I') is not 32 bits wide here")
    return packed.tobytes()


def input_digest(token_ids: Sequence[int]) -> bytes:
    """Return the `Root.input_digest` of an encoder's input: the SHA-256 of its packed ids. Raises OverflowError as pack_tokens
    does."""
    return sha256(pack_tokens(token_ids)).digest()
