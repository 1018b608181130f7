"""block_hash = xxh64(parent hash as 8 little-endian bytes ‖ tokens as little-endian uint32), seeded by the root: a public name,
so it must not change by accident. The vectors are computed here with xxhash and struct alone.
A hit is decided by the tokens: equal names for different content are harmless."""

from __future__ import annotations

import struct

import pytest
import xxhash

from kvpool.cache_service.core.hashing import block_hash, root_bytes, xxh64
from kvpool.cache_service.core.messages import Root
from tests.cache_service.core.desk import Desk
from tests.cache_service.core.lockstep import FINGERPRINT, HASH_FUNCTIONS, token_bytes


def _root_hash(fields: list[bytes]) -> int:
    encoded = b"".join(struct.pack("<I", len(field)) + field for field in fields)
    return int(xxhash.xxh64(encoded, seed=0).intdigest())


def _chain(root_hash: int, tokens: list[int], block_size: int) -> list[int]:
    names, parent = [], root_hash
    for begin in range(0, len(tokens) - block_size + 1, block_size):
        data = struct.pack(f"<Q{block_size}I", parent, *tokens[begin : begin + block_size])
        parent = int(xxhash.xxh64(data, seed=0).intdigest())
        names.append(parent)
    return names


def test_xxh64_is_the_published_function() -> None:
    """The reference vectors of XXH64 with seed 0."""
    assert xxh64(b"") == 0xEF46DB3751D8E999
    assert xxh64(b"a") == 0xD24EC4F1A98C6E5B
    assert xxh64(b"abc") == 0x44BC2CF5AD770999


def test_a_block_name_is_a_fixed_number() -> None:
    """One vector written down, so that neither byte order nor seed can change on both sides of a test at once."""
    assert block_hash(xxh64, 1, token_bytes([1, 2, 3, 4])) == xxhash.xxh64_intdigest(
        bytes.fromhex("010000000000000001000000020000000300000004000000")
    )
    assert block_hash(xxh64, 0x0102030405060708, token_bytes([0xAABBCCDD])) == xxhash.xxh64_intdigest(
        bytes.fromhex("0807060504030201ddccbbaa")
    )


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("root", [Root(FINGERPRINT), Root(FINGERPRINT, "adapter", "salt", bytes(range(32)))])
def test_sealed_blocks_carry_the_chained_names(block_size: int, root: Root) -> None:
    worker = Desk(block_size=block_size)
    tokens = [3, 70_000, 2**32 - 1, 0, 5, 6, 7, 8, 9]
    worker.grant("s", tokens, root=root)
    worker.report("s")
    fields = [
        root.model_fingerprint.encode(),
        root.adapter.encode(),
        root.tenant_salt.encode(),
        root.input_digest,
        struct.pack("<I", block_size),
    ]
    expected = _chain(_root_hash(fields), tokens, block_size)
    described = {block.block: block for block in worker.manager.describe_blocks("w1")}
    table = worker.table("s")
    assert [described[block].block_hash for block in table[: len(expected)]] == expected
    assert all(described[block].sealed for block in table[: len(expected)])
    assert not any(described[block].sealed for block in table[len(expected) :])


def test_the_encoding_of_a_root_is_injective() -> None:
    roots = [
        Root("ab", "c", "d"),
        Root("a", "bc", "d"),
        Root("a", "b", "cd"),
        Root("abcd"),
        Root("", "abcd"),
        Root("", "", "abcd"),
        Root("", "", "", b"abcd"),
        Root("ab", "c", "d", b"\0" * 32),
    ]
    assert len({root_bytes(root, size) for root in roots for size in (1, 2, 4, 256)}) == len(roots) * 4


def test_the_planted_ancestor_splice_gives_no_hit() -> None:
    """Block t1 was computed after a0; the prompt b0 + t1 must not get it although a0 and b0 have the same hash."""
    worker = Desk(hash_function=HASH_FUNCTIONS["constant"])
    a0, b0, t1 = [1, 2, 3, 4], [9, 9, 9, 9], [5, 6, 7, 8]
    worker.serve("a", [*a0, *t1, 0])
    assert worker.serve("b", [*b0, 0]) == 0
    assert worker.grant("spliced", [*b0, *t1, 0]).num_cached_tokens == 4, "only b0 itself is a hit"
    worker.report("spliced")
    assert worker.grant("a again", [*a0, *t1, 0]).num_cached_tokens == 8


@pytest.mark.parametrize("hash_name", ["low 8 bits", "constant"])
def test_roots_with_colliding_hashes_stay_apart(hash_name: str) -> None:
    worker = Desk(hash_function=HASH_FUNCTIONS[hash_name])
    roots = [
        Root(FINGERPRINT),
        Root(FINGERPRINT, adapter="x"),
        Root(FINGERPRINT, tenant_salt="x"),
        Root(FINGERPRINT, input_digest=b"x" * 32),
        Root(FINGERPRINT, adapter="x", tenant_salt="x"),
    ]
    for i, root in enumerate(roots):
        assert worker.serve(f"s{i}", range(9), root=root) == 0
    for i, root in enumerate(roots):
        assert worker.serve(f"again{i}", range(9), root=root) == 8
