"""Block hashes: the public names of sealed blocks.

block_hash = xxh64(parent block_hash as 8 little-endian bytes ‖ tokens as little-endian uint32). The parent of a first block
is its root, whose hash covers the namespace, the block size and the digest of foreign input. A hash is a name for events and
displays and never decides a hit: the prefix tree compares the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from .messages import Root

HashFunction = Callable[[bytes], int]
"""Maps bytes to an unsigned 64-bit integer."""


xxh64: HashFunction = xxhash.xxh64_intdigest
"""xxh64 with seed 0."""


def root_bytes(root: Root, block_size: int) -> bytes:
    """An injective encoding of the root: every field preceded by its length."""
    fields = (
        root.model_fingerprint.encode(),
        root.adapter.encode(),
        root.tenant_salt.encode(),
        root.input_digest,
        block_size.to_bytes(4, "little"),
    )
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)


def block_hash(hash_function: HashFunction, parent_hash: int, tokens: bytes) -> int:
    """The hash of the block that holds `tokens` after the block with `parent_hash`."""
    return hash_function(parent_hash.to_bytes(8, "little") + tokens)
