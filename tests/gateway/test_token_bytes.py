"""The bytes of tokens: put together, they are the bytes of the text, wherever a character is cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvpool.gateway.openai.token_bytes import TokenBytes, byte_alphabet, shown

TEXTS = ("hello world", "héllo wörld 日本語", "🙂 and 🙃", "tab\tand\nline", " leading", "ﬁ ½ \u00a0")


def byte_level() -> Tokenizer:
    """Byte-level BPE with few merges, so that most characters beyond ASCII are cut."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["hello world"] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As SentencePiece writes it: ▁ for spaces, <0x..> for bytes of what the vocabulary lacks."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlorw", "▁world", "hello"]
    merges: list[tuple[str, str]] = []
    tokenizer = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_join_to_those_of_the_text(make: object, text: str) -> None:
    tokenizer = make()  # type: ignore[operator]
    tokens = TokenBytes(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(map(tokens.of, ids)) == text.encode()
    if text == TEXTS[2]:
        assert any(shown(tokens.of(token_id)).startswith("bytes:") for token_id in ids), "a character was cut"


_BYTE_LEVEL = byte_level()


@given(st.text(max_size=40))
@settings(max_examples=50, deadline=None)
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    tokens = TokenBytes(_BYTE_LEVEL)
    ids = _BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    assert b"".join(map(tokens.of, ids)) == text.encode()


@pytest.mark.parametrize(
    ("make", "num_replaced"),
    [(byte_level, {"e381": 1, "f09f91": 1, "ffe3": 2}), (byte_fallback, {"e381": 2, "f09f91": 3, "ffe3": 2})],
)
def test_offsets_count_what_the_tokenizer_makes_of_bytes_that_are_no_character(
    make: Callable[[], Tokenizer], num_replaced: dict[str, int]
) -> None:
    tokenizer = make()
    tokens = TokenBytes(tokenizer)
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    for raw, count in num_replaced.items():
        names = [letters[byte] if make is byte_level else f"<0x{byte:02X}>" for byte in bytes.fromhex(raw)]
        ids = [token_id for name in [*names, "h"] if (token_id := tokenizer.token_to_id(name)) is not None]
        text = tokens.decoder().decode(b"".join(map(tokens.of, ids)))
        assert text == tokenizer.decode(ids) == "\ufffd" * count + "h"


@pytest.mark.parametrize("content", ["é", "naïve x", "\ufffd"])
def test_an_added_token_has_the_bytes_that_its_decoder_makes_of_it(content: str) -> None:
    """A byte-level decoder takes its letters for bytes, if all of them stand for some."""
    tokenizer = byte_level()
    tokenizer.add_tokens([content])
    token_id = tokenizer.token_to_id(content)
    assert token_id is not None
    assert TokenBytes(tokenizer).of(token_id).decode(errors="replace") == tokenizer.decode([token_id])


def test_special_tokens_have_their_name_and_unknown_ids_nothing() -> None:
    tokens = TokenBytes(_BYTE_LEVEL)
    end = _BYTE_LEVEL.token_to_id("<|end|>")
    assert end is not None
    assert (tokens.of(end), tokens.is_special(end)) == (b"<|end|>", True)
    assert (tokens.of(10**6), tokens.is_special(10**6)) == (b"", False)


def test_the_alphabet_has_each_byte_once() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())


def test_half_a_character_is_shown_as_its_bytes() -> None:
    assert shown("é".encode()[:1]) == "bytes:\\xc3"
    assert shown(b"plain") == "plain"
