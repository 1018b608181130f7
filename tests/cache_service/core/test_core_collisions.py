"""Rule 1: a hit is decided by the tokens. A hash is a name, so equal names for different content must be harmless."""

from __future__ import annotations

import pytest

from kvpool.cache_service.core.messages import Root
from tests.cache_service.core.desk import Desk
from tests.cache_service.core.lockstep import FINGERPRINT, HASH_FUNCTIONS


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
