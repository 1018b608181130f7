"""The worker's guard over its blocks: what it refuses although the manager says it. A manager that is right never says it."""

from __future__ import annotations

import pytest

from kvpool.v1 import common_pb2
from kvpool.worker_service.cache.ledger import BlockLedger, Content, DisagreementError
from tests.worker_service.windowed import ROOT, fill

_TOKENS = b"\0\0\0\0"


def _with_a_complete_block(generation: int = 5) -> BlockLedger:
    """Block 1 was granted with that generation, filled, and let go."""
    ledger = BlockLedger(4)
    ledger.accept_grant(1, generation)
    ledger.use(1)
    ledger.complete(1, Content(None, ROOT, _TOKENS))
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
    ledger.accept_hits([1], [5], _TOKENS, ROOT)
    for generation in (4, 6):
        with pytest.raises(DisagreementError, match="here it has generation 5"):
            ledger.accept_hits([1], [generation], _TOKENS, ROOT)
    ledger.accept_grant(2, 7)
    ledger.use(2)
    with pytest.raises(DisagreementError, match="its KV is not complete"):
        ledger.accept_hits([2], [7], _TOKENS, ROOT)


@pytest.mark.parametrize("block", [0, 4, 2**32 - 1])
def test_only_blocks_of_the_pool_exist(block: int) -> None:
    """Block 0 is the null block."""
    ledger = BlockLedger(4)
    with pytest.raises(DisagreementError, match="does not exist"):
        ledger.accept_grant(block, 1)
    with pytest.raises(DisagreementError, match="does not exist"):
        ledger.accept_hits([block], [1], _TOKENS, ROOT)


def _accept(ledger: BlockLedger, blocks: list[int], tokens: bytes, root: common_pb2.Root = ROOT) -> None:
    """Blocks as `fill` has made them are handed out for a prompt."""
    ledger.accept_hits(blocks, [1] * len(blocks), tokens, root)


def test_hits_need_the_tokens_of_the_prompt() -> None:
    """Exact hits: whatever the manager believes that a block holds, the worker knows."""
    ledger = BlockLedger(4)
    fill(ledger, 1, b"aaaa", b"bbbb")
    _accept(ledger, [1, 2], b"aaaabbbb")
    for tokens, block in ((b"aaabbbbb", 1), (b"aaaabbbc", 2), (b"bbbbaaaa", 1), (b"aaaa", 2), (b"", 1)):
        with pytest.raises(DisagreementError, match=f"block {block} .* other tokens"):
            _accept(ledger, [1, 2], tokens)


def test_hits_need_blocks_for_all_of_the_tokens() -> None:
    """As many tokens as the manager says are cached: KV that no block has would be read."""
    ledger = BlockLedger(4)
    fill(ledger, 1, b"aaaa", b"bbbb")
    for blocks, tokens in (([], b"aaaa"), ([1], b"aaaabbbb"), ([1], b"aaaab"), ([1, 2], b"aaaabbbbcccc")):
        with pytest.raises(DisagreementError, match=f"the {len(blocks)} blocks returned hold"):
            _accept(ledger, blocks, tokens)
    _accept(ledger, [], b"")


def test_a_hit_needs_the_prefix_that_its_block_was_computed_after() -> None:
    """A block's KV depends on all tokens before it: its own tokens prove nothing."""
    ledger = BlockLedger(8)
    fill(ledger, 1, b"aaaa", b"same", b"last")
    fill(ledger, 4, b"xxxx", b"same")
    for blocks, tokens in (
        ([4, 2], b"xxxxsame"),
        ([2], b"same"),
        ([4, 4], b"xxxxxxxx"),
        # The parents hold equal tokens; what these were computed after differs.
        ([4, 5, 3], b"xxxxsamelast"),
    ):
        with pytest.raises(DisagreementError, match=f"block {blocks[-1]} .* a prefix other than its own"):
            _accept(ledger, blocks, tokens)


def test_a_hit_after_a_duplicate_of_its_prefix_is_a_hit() -> None:
    """Two sequences computed the same beginning; the manager serves one's blocks, and after them a block of the other's."""
    ledger = BlockLedger(8)
    fill(ledger, 1, b"aaaa", b"bbbb")
    _, _, third, _ = fill(ledger, 3, b"aaaa", b"bbbb", b"cccc", b"dddd")
    _accept(ledger, [1, 2, 5, 6], b"aaaabbbbccccdddd")
    assert third.parent is ledger.content(2), "compared once, known from then on"


def test_hits_need_the_root_of_the_prompt() -> None:
    """Another adapter or tenant: equal tokens, other KV; at the beginning of a chain and after a duplicate."""
    other = common_pb2.Root(model_fingerprint="m", tenant_salt="t")
    ledger = BlockLedger(8)
    fill(ledger, 1, b"aaaa")
    fill(ledger, 2, b"aaaa", b"bbbb", root=other)
    with pytest.raises(DisagreementError, match="a root other than its own"):
        _accept(ledger, [1], b"aaaa", other)
    _accept(ledger, [1], b"aaaa", common_pb2.Root(model_fingerprint="m"))
    with pytest.raises(DisagreementError, match="a prefix other than its own"):
        _accept(ledger, [1, 3], b"aaaabbbb")
    with pytest.raises(DisagreementError, match="a root other than its own"):
        _accept(ledger, [2, 3], b"aaaabbbb")
