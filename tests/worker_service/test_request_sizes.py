"""The limit of Generate's bytes: nothing legal is refused, whatever the tokenizer does to a text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvpool.process.server_settings import MAX_MESSAGE_BYTES
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from worker_service.request_sizes import max_prompt_bytes

MAX_MODEL_LEN = 1000
VOCAB_SIZE = 50_000


def byte_level(*longer: str) -> Tokenizer:
    """One token per byte, and some longer ones."""
    vocabulary = {token: number for number, token in enumerate((*sorted(pre_tokenizers.ByteLevel.alphabet()), *longer))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_the_longest_token_decides() -> None:
    assert max_prompt_bytes(MAX_MODEL_LEN, VOCAB_SIZE, byte_level()) == MAX_MODEL_LEN * 4
    assert max_prompt_bytes(MAX_MODEL_LEN, VOCAB_SIZE, byte_level("x" * 81)) == MAX_MODEL_LEN * 81
    special = byte_level()
    special.add_special_tokens(["<|" + "y" * 46 + "|>"])
    assert max_prompt_bytes(MAX_MODEL_LEN, VOCAB_SIZE, special) == MAX_MODEL_LEN * 50


@pytest.mark.parametrize("vocab_size", [1, 2, 128, 129, 264, 1 << 14, (1 << 14) + 1, 50_000, 1 << 21, 1 << 31])
def test_ids_that_are_not_packed_have_room(vocab_size: int) -> None:
    """A tag and a varint for each, which old encoders write."""
    from kvpool.v1 import worker_pb2

    largest = worker_pb2.GenerateRequest(token_ids=worker_pb2.TokenIds(ids=[vocab_size - 1] * MAX_MODEL_LEN))
    packed = largest.token_ids.ByteSize()
    assert max_prompt_bytes(MAX_MODEL_LEN, vocab_size, None) >= packed - 4 + MAX_MODEL_LEN


@pytest.mark.parametrize("text", ["a", "é", "漢", "🙂", " ", "\n", "\x00"])
def test_a_text_of_as_many_tokens_as_the_model_takes_is_below_the_limit(text: str) -> None:
    tokenizer = byte_level()
    assert max_prompt_bytes(len(tokenizer.encode(text * 50).ids), VOCAB_SIZE, tokenizer) >= len((text * 50).encode())


def strip(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Strip()


def nested(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.NFKC()])


def shorter(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace("  ", " ")


def pattern(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace(Regex(" +"), " ")


def whitespace(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()


def removed(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )


def swallowing(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])


def other_model(tokenizer: Tokenizer) -> None:
    tokenizer.model = models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")


def bytes_missing(tokenizer: Tokenizer) -> None:
    tokenizer.model = models.BPE({"a": 0, "b": 1}, [])


@pytest.mark.parametrize(
    "change", [strip, nested, shorter, pattern, whitespace, removed, swallowing, other_model, bytes_missing]
)
def test_a_tokenizer_that_may_drop_text_gets_what_a_message_holds(change: Callable[[Tokenizer], None]) -> None:
    """A megabyte of spaces may be one token, or none."""
    tokenizer = byte_level()
    change(tokenizer)
    assert max_prompt_bytes(MAX_MODEL_LEN, VOCAB_SIZE, tokenizer) == MAX_MESSAGE_BYTES


def llama(tokenizer: Tokenizer) -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer.model = models.BPE(vocabulary, [], byte_fallback=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None


def split(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )


@pytest.mark.parametrize("change", [llama, split])
def test_a_tokenizer_that_keeps_every_byte_has_the_small_limit(change: Callable[[Tokenizer], None]) -> None:
    tokenizer = byte_level()
    change(tokenizer)
    assert max_prompt_bytes(MAX_MODEL_LEN, VOCAB_SIZE, tokenizer) < 10 * MAX_MODEL_LEN
