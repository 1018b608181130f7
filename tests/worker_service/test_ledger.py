"""The worker's guard over its blocks: what it refuses although the manager says it. A manager that is right never says it."""

from __future__ import annotations

import pytest
from kvpool.v1 import common_pb2

from worker_service.cache.ledger import BlockLedger, Content, DisagreementError

_ROOT = common_pb2.Root(model_fingerprint="m")


def _with_a_complete_block(generation: int = 5) -> BlockLedger:
    """Block 1 was granted with that generation, filled, and let go."""
    ledger = BlockLedger(4)
    ledger.accept_grant(1, generation)
    ledger.use(1)
    ledger.complete(1, Content(None, _ROOT, b"\0\0\0\0"))
    ledger.drop(1)
    return ledger


@pytest.mark.parametrize("generation", [0, 4, 5])
def test_a_grant_needs_a_larger_generation(generation: int) -> None:
    """One writer: an older grant, or the same again, comes late. What the block holds stays."""
    ledger = _with_a_complete_block()
    with pytest.raises(DisagreementError, match="not larger than 5"):
        ledger.accept_grant(1, generation)
    assert ledger.content(1) is not None
    assert ledger.idle_blocks() == [1]
    ledger.accept_grant(1, 6)
    assert ledger.content(1) is None


def test_a_block_that_a_table_names_is_granted_to_nobody() -> None:
    """One writer: however large the generation, while somebody here uses the block."""
    ledger = _with_a_complete_block()
    ledger.use(1)
    with pytest.raises(DisagreementError, match="while 1 tables name it"):
        ledger.accept_grant(1, 6)
    ledger.drop(1)
    ledger.accept_grant(1, 6)


def test_a_hit_needs_a_block_completed_under_that_generation() -> None:
    """Sealed-only sharing: not one that is still being filled, and not what it held under another grant."""
    ledger = _with_a_complete_block()
    ledger.accept_hit(1, 5)
    for generation in (4, 6):
        with pytest.raises(DisagreementError, match="here it has generation 5"):
            ledger.accept_hit(1, generation)
    ledger.accept_grant(2, 7)
    ledger.use(2)
    with pytest.raises(DisagreementError, match="its KV is not complete"):
        ledger.accept_hit(2, 7)


@pytest.mark.parametrize("block", [0, 4, 2**32 - 1])
def test_only_blocks_of_the_pool_exist(block: int) -> None:
    """Block 0 is the null block."""
    ledger = BlockLedger(4)
    with pytest.raises(DisagreementError, match="does not exist"):
        ledger.accept_grant(block, 1)
    with pytest.raises(DisagreementError, match="does not exist"):
        ledger.accept_hit(block, 1)
