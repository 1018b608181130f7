"""Token ids as bytes."""

from __future__ import annotations

import pytest

from kvpool.protocol.tokens import pack_tokens


def test_ids_are_little_endian_words_in_their_order() -> None:
    assert pack_tokens([]) == b""
    assert pack_tokens((1, 0x01020304, 2**32 - 1)) == bytes.fromhex("01000000 04030201 ffffffff")


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_what_is_no_uint32_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token_id])
