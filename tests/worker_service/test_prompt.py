"""A prompt is measured before anything is made of it, and no text that fits is refused, whatever its tokenizer makes of it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from kvpool.protocol.byte_level import byte_letters
from kvpool.protocol.limits import MAX_MESSAGE_BYTES
from kvpool.protocol.text_bound import NORMAL_FORM_FACTOR, TextBound, text_measure
from kvpool.v1 import worker_pb2
from kvpool.worker_service.codec import check_generate, decode_generate
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.engine.prompt import PromptEncoder
from kvpool.worker_service.servicer import max_prompt_bytes

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁hello", "▁world", "▁", "▁▁▁▁▁▁▁▁", "lo", "é", "hello", "world", " "]


def bpe(*further: str, missing: str = "", **options: Any) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate([*BYTES, *WORDS, *further]) if token != missing}
    options = {"byte_fallback": True, "fuse_unk": True, "unk_token": None, **options}
    return Tokenizer(models.BPE(vocab=vocabulary, merges=[], **options))


def byte_level(normalizer: normalizers.Normalizer | None = None, missing: bytes = b"") -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and DeepSeek have it."""
    letters = [letter for byte, letter in enumerate(byte_letters()) if byte not in missing]
    vocabulary = {token: index for index, token in enumerate([*letters, "he", "ll", "hell", "hello", "Ġw", "ÃŃÃŃ"])}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizer
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.add_special_tokens(["<|im_end|>"])
    return tokenizer


def with_parts(tokenizer: Tokenizer, normalizer: Any = None, pre_tokenizer: Any = None) -> Tokenizer:
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["<s>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


KEEP_EVERY_BYTE: dict[str, Callable[[], Tokenizer]] = {
    "Llama 2": lambda: with_bos(
        with_parts(bpe(), normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))
    ),
    "Gemma": lambda: with_parts(
        bpe(), normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")
    ),
    "Mistral": lambda: with_parts(bpe(), None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "GPT-2": byte_level,
    # Some of these occur in no text that it was trained on, the others in no text at all.
    "SmolLM2": lambda: byte_level(missing=b"\x04\x06\x13\x1d\xf1\xf2\xc0\xc1\xf5\xff"),
    "Qwen": lambda: byte_level(normalizers.NFC()),
    "byte level over NFKC": lambda: byte_level(normalizers.Sequence([normalizers.NFKC()])),
    "an unknown token for each character": lambda: bpe("<unk>", byte_fallback=False, fuse_unk=False, unk_token="<unk>"),
}


def phi3() -> Tokenizer:
    tokenizer = KEEP_EVERY_BYTE["Llama 2"]()
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    return with_parts(tokenizer, normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer())


def unigram() -> Tokenizer:
    return Tokenizer(models.Unigram([("<unk>", 0.0), ("hello", -1.0), ("▁", -2.0)], unk_id=0, byte_fallback=False))


SHORTEN: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "a special token that swallows spaces": (phi3, "hello<|end|>" + " " * 60_000 + "hello"),
    "Strip": (lambda: with_parts(bpe(), normalizers.Strip()), " " * 60_000 + "hello"),
    "spaces collapsed": (lambda: with_parts(bpe(), normalizers.Replace(Regex(" +"), " ")), "hello" + " " * 60_000),
    "a longer string replaced": (lambda: with_parts(bpe(), normalizers.Replace("x" * 30, "")), "x" * 60_000 + "lo"),
    "accents stripped": (
        lambda: with_parts(bpe(), normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
        "lo" + "\u0301" * 30_000,
    ),
    "WordPiece": (word_piece, "hello" + " " * 60_000 + "y" * 60_000),
    "unknown characters fused": (unigram, "ж" * 60_000),
    "unknown characters dropped": (lambda: bpe(byte_fallback=False), "lo" + "ж" * 60_000),
    "unknown characters fused by BPE": (
        lambda: bpe("<unk>", byte_fallback=False, unk_token="<unk>"),
        "lo" + "ж" * 60_000,
    ),
    "spaces dropped between words": (lambda: with_parts(bpe(), None, pre_tokenizers.WhitespaceSplit()), " " * 60_000),
    "split and removed": (lambda: with_parts(bpe(), None, pre_tokenizers.Split("-", "removed")), "-" * 60_000 + "lo"),
    "bytes dropped": (lambda: byte_level(missing=b"\x04\xf1"), "hello" + "\x04" * 60_000),
    "bytes dropped after a normal form": (
        lambda: byte_level(normalizers.NFC(), missing=b"\x04"),
        "hello" + "\x04" * 60_000,
    ),
    "a byte without a token": (lambda: bpe(missing="<0x01>"), "lo" + "\x01" * 60_000),
}
"""Each with a text of few tokens."""


@pytest.fixture(scope="module", params=list(KEEP_EVERY_BYTE))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KEEP_EVERY_BYTE[request.param]()


PIECES = [
    "hello",
    "        ",
    "e\u0301",
    "\u1fbe\u0308\u0301",
    "<s>",
    "<|im_end|>",
    "東京",
    "hello " * 300,
    *" éΐK𝐀\u3000ﬁ🤖\x00\x04\U00040000\n한7",
]


@given(text=st.lists(st.sampled_from(PIECES) | st.characters(codec="utf-8"), max_size=40).map("".join))
def test_a_text_that_fits_is_never_refused(tokenizer: Tokenizer, text: str) -> None:
    """The bound for as many tokens as it has is not below its size. Its ids are those of encode, with the special tokens that the
    tokenizer itself adds, and those that the text contains."""
    ids = tokenizer.encode(text).ids
    assert text_measure(tokenizer).bound(len(ids)).excess(text) is None
    assert PromptEncoder(tokenizer, len(ids) + 1).encode(text) == ids


def test_the_bound_is_that_of_the_longest_token(tokenizer: Tokenizer) -> None:
    """Not larger: these tokenizers are not among those that may shorten a text."""
    longest = max(len(token.encode()) for token in tokenizer.get_vocab())
    forms = 4 if "NF" in repr(tokenizer.normalizer) else 1
    bound = text_measure(tokenizer).bound(100)
    assert bound.max_bytes <= 100 * longest * forms
    assert bound.excess("x" * (100 * longest * forms + 1)) == 100 * longest * forms + 1


@pytest.mark.parametrize(("kind", "text"), SHORTEN.values(), ids=SHORTEN.keys())
def test_a_text_that_the_tokenizer_shortens_is_not_refused(kind: Callable[[], Tokenizer], text: str) -> None:
    """It is far longer than its tokens are; only tokenising shows that it fits."""
    expected = kind().encode(text).ids
    assert len(expected) < 20
    prompts = PromptEncoder(kind(), 20)
    assert prompts.encode(text) == expected


def test_normal_forms_shorten_no_more_than_the_bound_allows() -> None:
    """For all characters of Unicode: bytes that can have become one character, by way of its decomposition."""
    forms: list[tuple[Literal["NFC", "NFKC"], Literal["NFD", "NFKD"]]] = [("NFC", "NFD"), ("NFKC", "NFKD")]
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for composed, decomposed in forms:
        parts = {
            character: decomposition
            for character in characters
            if (decomposition := unicodedata.normalize(decomposed, character)) != character
        }
        assert len(parts) > 10_000
        most: dict[str, int] = {}
        """Bytes of the longest character that has become this one."""
        for character, decomposition in parts.items():
            assert decomposition
            if len(decomposition) == 1:
                most[decomposition] = max(most.get(decomposition, 0), len(character.encode()))
        for character, decomposition in [*parts.items(), *((character, character) for character in most)]:
            before = sum(max(most.get(part, 0), len(part.encode())) for part in decomposition)
            assert len(character.encode()) <= before
            if unicodedata.normalize(composed, character) == character:
                assert before <= NORMAL_FORM_FACTOR * len(character.encode()), hex(ord(character))


def test_truncation_and_padding_left_over_from_training_do_nothing() -> None:
    tokenizer = byte_level()
    expected = tokenizer.encode("hello " * 9).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    assert PromptEncoder(tokenizer, 1000).encode("hello " * 9) == expected


class UntouchedTokenizer:
    """A real tokenizer that fails the test when it is asked for tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, *arguments: Any) -> NoReturn:
        raise AssertionError("tokenised")

    encode = encode_batch = encode_batch_fast


def asked(**prompt: Any) -> worker_pb2.GenerateRequest:
    return worker_pb2.GenerateRequest(sequence_id="s", attempt=1, **prompt)


def test_a_text_of_15_megabytes_is_refused_untouched() -> None:
    """With figures and with what to change."""
    prompts = PromptEncoder(UntouchedTokenizer(byte_level()), 2048)  # type: ignore[arg-type]
    with pytest.raises(EngineError) as caught:
        check_generate(asked(text="hello world " * 1_300_000), prompts, "fp")
    assert (caught.value.kind, caught.value.field) == (ErrorKind.INVALID, "prompt")
    for word in ("15600000 bytes", str(prompts.text_bound.max_bytes), "2048 tokens", "--max-model-len"):
        assert word in caught.value.message


def test_text_is_measured_in_bytes() -> None:
    """A text of few characters of many bytes too."""
    prompts = PromptEncoder(UntouchedTokenizer(byte_level()), 100)  # type: ignore[arg-type]
    text = "€" * (prompts.text_bound.max_bytes // 3 + 1)
    assert len(text) < prompts.text_bound.max_bytes
    with pytest.raises(EngineError, match=f"has {len(text.encode())} bytes"):
        prompts.check_text(text)
    prompts.check_text(text[:-1])


class Ids:
    """Ids of a request that can be counted; listing them fails the test."""

    def __len__(self) -> int:
        return 4_000_000

    def __iter__(self) -> NoReturn:
        raise AssertionError("listed")


class IdsRequest:
    """A request with more ids than any model takes."""

    class token_ids:
        ids = Ids()

    def __getattr__(self, name: str) -> Any:
        return getattr(asked(token_ids=worker_pb2.TokenIds()), name)


def test_too_many_ids_are_refused_unlisted() -> None:
    prompts = PromptEncoder(None, 2048)
    with pytest.raises(EngineError, match=r"4000000 tokens .* 2048 .*--max-model-len") as caught:
        check_generate(IdsRequest(), prompts, "fp")  # type: ignore[arg-type]
    assert (caught.value.kind, caught.value.field) == (ErrorKind.INVALID, "prompt")


def test_the_last_prompt_that_leaves_room_is_taken() -> None:
    prompts = PromptEncoder(None, 4)
    fits = asked(token_ids=worker_pb2.TokenIds(ids=[1, 2, 3]))
    assert decode_generate(fits, prompts).token_ids == [1, 2, 3]
    with pytest.raises(EngineError, match="leave no room"):
        check_generate(asked(token_ids=worker_pb2.TokenIds(ids=[1, 2, 3, 4])), prompts, "fp")


def test_a_text_of_too_many_tokens_is_refused_unlisted() -> None:
    """Within the bound in bytes; its tokens are counted before they become a list."""
    prompts = PromptEncoder(byte_level(), 20)
    with pytest.raises(EngineError, match="leave no room"):
        prompts.encode("x" * 21)
    assert len(prompts.encode("x" * 19)) == 19


def test_the_letters_of_bytes_are_those_of_tokenizers() -> None:
    assert sorted(byte_letters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = byte_level()
    for byte in b"\x00 a~\x7f":
        assert tokenizer.encode(chr(byte)).tokens == [byte_letters()[byte]]
    assert tokenizer.encode("é").tokens == [byte_letters()[0xC3], byte_letters()[0xA9]]


# -- the limit of Generate's bytes: no prompt that is tokenised, or that is ids, is refused by its size

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
