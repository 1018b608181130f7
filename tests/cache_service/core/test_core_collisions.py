"""Rule 1: a hit is decided by the tokens. A hash is a name, so equal names for different content must be harmless."""

from __future__ import annotations

import pytest

from kvpool.cache_service.core.messages import Root
from tests.cache_service.core.desk import ROOT, Desk
from tests.cache_service.core.lockstep import FINGERPRINT, HASH_FUNCTIONS, path_of, token_bytes


@pytest.mark.parametrize("hash_name", ["low 8 bits", "constant"])
def test_the_planted_ancestor_splice_gives_no_hit(hash_name: str) -> None:
    """Block t1 was computed behind a0; the prompt b0 + t1 must not get it although a0 and b0 have the same hash."""
    hash_function = HASH_FUNCTIONS[hash_name]
    worker = Desk(hash_function=hash_function)
    a0, t1 = [1, 2, 3, 4], [5, 6, 7, 8]
    worker.serve("a", [*a0, *t1, 0])
    name_of_a0 = _names(worker)[tuple(a0)]
    # b0: other tokens of the same name, found by search and planted, as an attacker would.
    b0 = next(
        candidate
        for candidate in ([9, 9, 9, i] for i in range(100_000))
        if _hash_of_first(worker, candidate) == name_of_a0
    )
    assert worker.serve("b", [*b0, 0]) == 0
    assert _names(worker)[tuple(b0)] == name_of_a0
    granted = worker.grant("spliced", [*b0, *t1, 0])
    assert granted.num_cached_tokens == 4, "only b0 itself is a hit"
    worker.report("spliced")
    names = _names(worker)
    assert names[*b0, *t1] == names[*a0, *t1], "the names do collide"
    assert worker.grant("a again", [*a0, *t1, 0]).num_cached_tokens == 8


def _names(worker: Desk) -> dict[tuple[int, ...], int]:
    pool = worker.session.pools[0]
    nodes = [node for block in range(1, pool.num_blocks) if (node := pool.node(block)) is not None]
    return {path_of(node)[2]: node.block_hash for node in nodes if node.block_hash is not None}


def _hash_of_first(worker: Desk, tokens: list[int]) -> int:
    root = worker.manager._tree.find_root(ROOT, 4)
    assert root is not None
    assert root.block_hash is not None
    return worker.lockstep.hash_function(root.block_hash.to_bytes(8, "little") + token_bytes(tokens))


@pytest.mark.parametrize("hash_name", ["low 8 bits", "constant"])
def test_roots_with_colliding_hashes_stay_apart(hash_name: str) -> None:
    """Tenant, adapter, model and encoder input separate prefixes by value, not by hash."""
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
