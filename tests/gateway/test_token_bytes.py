"""The bytes of tokens: put together, they are the bytes of the text, wherever a character is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvpool.client import Model
from kvpool.client.token_bytes import TokenBytes
from kvpool.gateway.openai.logprobs import CompletionLogprobs, shown, token_bytes
from kvpool.protocol.byte_level import byte_letters


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


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40))
@settings(max_examples=50, deadline=None)
@example("tab\tand\nline")
@example(" leading")
def test_any_text_comes_back_from_its_tokens(tokenizer: Tokenizer, text: str) -> None:
    tokens = TokenBytes(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(map(tokens.of, ids)) == text.encode()


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_half_a_character_is_shown_as_its_bytes(tokenizer: Tokenizer) -> None:
    tokens = TokenBytes(tokenizer)
    pieces = [shown(tokens.of(token_id)) for token_id in tokenizer.encode("🙂", add_special_tokens=False).ids]
    assert pieces == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82"]
    assert shown(b"plain") == "plain"


@pytest.mark.parametrize(
    ("make", "num_replaced"),
    [(byte_level, {"e381": 1, "f09f91": 1, "ffe3": 2}), (byte_fallback, {"e381": 2, "f09f91": 3, "ffe3": 2})],
)
def test_offsets_count_what_the_tokenizer_makes_of_bytes_that_are_no_character(
    make: Callable[[], Tokenizer], num_replaced: dict[str, int]
) -> None:
    tokenizer = make()
    tokens = TokenBytes(tokenizer)
    letters = byte_letters()
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
    tokenizer = TOKENIZERS["byte level"]
    tokens = TokenBytes(tokenizer)
    end = tokenizer.token_to_id("<|end|>")
    assert end is not None
    assert (tokens.of(end), tokens.is_special(end)) == (b"<|end|>", True)
    assert (tokens.of(10**6), tokens.is_special(10**6)) == (b"", False)


def test_other_files_for_the_same_weights_have_other_tokens() -> None:
    """A worker that comes may have another tokenizer than the one before."""
    model = Model("m", "fingerprint", "llama", "float32", 300, 64, (), byte_level(), None)
    (id_before,), (id_now,) = (make().encode("h", add_special_tokens=False).ids for make in (byte_level, byte_fallback))
    before, now = token_bytes(model), token_bytes(replace(model, tokenizer=byte_fallback()))
    assert before is not None
    assert now is not None
    assert (before.of(id_before), now.of(id_now)) == (b"h", b"h") != (before.of(id_now), now.of(id_before))


def marked_spaces(decoder: decoders.Decoder) -> Tokenizer:
    """As SentencePiece writes it, with a special token and one that is nothing but a space."""
    pieces = ["<unk>", "<s>", "▁", "▁a", "▁b", "a", "b", "é"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.decoder = decoder
    return tokenizer


DECODERS = {
    "one space": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    "two spaces": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "none": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
    "that of the first piece": decoders.Metaspace(prepend_scheme="first"),
    "no piece": decoders.Metaspace(prepend_scheme="never"),
}


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
@given(
    ids=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    cuts=st.sets(st.integers(1, 7)),
    num_prompt=st.integers(0, 4),
    echo=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_text_offsets_are_places_in_the_text(
    decoder: decoders.Decoder, ids: list[int], cuts: set[int], num_prompt: int, echo: bool
) -> None:
    """Many decoders leave out the first space of a text: it is among the bytes of its token and not in the text. However the tokens
    come in pieces, with an echo of the prompt or after it."""
    tokenizer = marked_spaces(decoder)
    tokens = TokenBytes(tokenizer)
    prompt = ids[:num_prompt]
    shown_ids = ids if echo else ids[num_prompt:]
    text = tokenizer.decode(ids) if echo else tokenizer.decode(ids)[len(tokenizer.decode(prompt)) :]
    encoder = CompletionLogprobs(tokens, 0, before=() if echo else prompt)
    bounds = sorted({0, *(cut for cut in cuts if cut < len(shown_ids)), len(shown_ids)})
    offsets: list[int] = []
    for begin, end in pairwise(bounds):
        offsets += encoder.encode(shown_ids[begin:end], [None] * (end - begin))["text_offset"]
    for token_id, (begin, end) in zip(shown_ids, pairwise([*offsets, len(text)]), strict=True):
        piece = "" if tokens.is_special(token_id) else tokens.of(token_id).decode()
        assert text[begin:end] in (piece, piece.lstrip(" ")), (text, offsets)
    assert offsets == sorted(offsets)
