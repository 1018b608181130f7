"""The limit of Generate's bytes: no prompt that is tokenised, or that is ids, is refused by its size.

Which texts are tokenised, whatever the tokenizer does to them, is in test_prompt.py.
"""

from __future__ import annotations

import pytest
from tokenizers import normalizers

from kvpool.protocol.limits import MAX_MESSAGE_BYTES
from kvpool.protocol.text_bound import TextBound, text_bound
from kvpool.v1 import worker_pb2
from kvpool.worker_service.request_sizes import max_prompt_bytes
from tests.worker_service.test_detokenizer import byte_level

MAX_MODEL_LEN = 1000
VOCAB_SIZE = 50_000


def test_the_longest_text_has_room() -> None:
    """As text, or as ids where those take more bytes."""
    assert max_prompt_bytes(MAX_MODEL_LEN, VOCAB_SIZE, TextBound(81 * MAX_MODEL_LEN)) == 81 * MAX_MODEL_LEN
    assert max_prompt_bytes(MAX_MODEL_LEN, VOCAB_SIZE, TextBound(0)) == 4 * MAX_MODEL_LEN


@pytest.mark.parametrize("vocab_size", [1, 2, 128, 129, 264, 1 << 14, (1 << 14) + 1, 50_000, 1 << 21, 1 << 31])
def test_ids_that_are_not_packed_have_room(vocab_size: int) -> None:
    """A tag and a varint for each, which old encoders write."""
    largest = worker_pb2.GenerateRequest(token_ids=worker_pb2.TokenIds(ids=[vocab_size - 1] * MAX_MODEL_LEN))
    packed = largest.token_ids.ByteSize()
    assert max_prompt_bytes(MAX_MODEL_LEN, vocab_size, TextBound(0)) >= packed - 4 + MAX_MODEL_LEN


def test_a_text_of_which_bytes_are_dropped_may_fill_a_message() -> None:
    """No more than that, whatever the bound of texts says."""
    assert max_prompt_bytes(MAX_MODEL_LEN, VOCAB_SIZE, TextBound(4000, b"\x04")) == MAX_MESSAGE_BYTES
    assert max_prompt_bytes(MAX_MODEL_LEN, VOCAB_SIZE, TextBound(MAX_MESSAGE_BYTES + 1)) == MAX_MESSAGE_BYTES


def test_a_tokenizer_that_shortens_texts_gets_room_for_them() -> None:
    """A megabyte of spaces may be one token."""
    tokenizer = byte_level()
    assert max_prompt_bytes(MAX_MODEL_LEN, VOCAB_SIZE, text_bound(tokenizer, MAX_MODEL_LEN)) < 10 * MAX_MODEL_LEN
    tokenizer.normalizer = normalizers.Strip()
    assert max_prompt_bytes(MAX_MODEL_LEN, VOCAB_SIZE, text_bound(tokenizer, MAX_MODEL_LEN)) >= 1 << 20
