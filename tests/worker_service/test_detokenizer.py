"""From tokens to text, one at a time, for each kind of decoder that language models use: the text is that of decoding the whole;
stop strings are found, and a text that moves goes on as if it had not."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from kvpool.protocol.byte_level import byte_letters
from kvpool.protocol.text_bound import parts
from kvpool.worker_service.engine.detokenizer import MAX_REPLAYED_TOKENS, MAX_WINDOW_TOKENS, TextDecoder

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIALS = ["<s>", "</s>", "[TOOL]"]
CUT = (b" \xf0\x9f", b"\x91\xa9\xe2", b"\x80\x8d\xf0\x9f\x91", b"\xef\xbf", b"\xbd\xe3", b"\x81\x82\xe3", b"x\xcc")
PIECES = ["▁hello", "▁world", "▁the", "▁a", "lo", "▁", "▁▁", "é", "€uro", "!"]


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    """Words with ▁ for a space, and single bytes where there is no word."""
    vocabulary = {token: index for index, token in enumerate([*BYTES, *PIECES])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token=None))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it: each byte is a character of its own alphabet; words begin with a space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġhello", "Ġworld", "Ġthe", "Ġa", "lo"]
    # Merges know nothing of characters: tokens begin and end inside of them.
    words += ["".join(map(byte_letters().__getitem__, raw)) for raw in CUT]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=None))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "Llama 2": lambda: sentencepiece(
        decoders.Sequence([
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
        ])
    ),
    "Mistral": lambda: sentencepiece(decoders.Metaspace()),
    "Metaspace over bytes": lambda: sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "Phi 3": lambda: phi3(),
    "Gemma": lambda: sentencepiece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "bytes alone": lambda: sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])),
    "byte level": byte_level,
}  # fmt: skip


def phi3() -> Tokenizer:
    """Llama 2's decoder, and special tokens that are no special ones for decoding."""
    tokenizer = KINDS["Llama 2"]()
    tokenizer.add_tokens(["<|extra|>"])
    return tokenizer


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    """Its ids 0 to 255 are bytes, 256 is a word."""
    return KINDS["Llama 2"]()


def pieces_of(decoder: TextDecoder, ids: Sequence[int]) -> list[str]:
    """What each token makes certain; after a stop string nothing, after the last token also what was held back."""
    pieces: list[str] = []
    for token_id in ids:
        pieces.append(decoder.add(token_id))
        if decoder.is_stopped:
            return pieces
    return [*pieces, decoder.finish()]


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    found = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in found, tokens
    return [token_id for token_id in found if token_id is not None]


def as_bytes(tokenizer: Tokenizer, text: bytes) -> list[int]:
    is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    names = byte_letters() if is_byte_level else BYTES
    return ids_of(tokenizer, *(names[byte] for byte in text))


WORDS = ["a", " ", "é", "日本", "e\u0301", "👩\u200d👩\u200d👧", "\ufffd", "caf\ufffd au", "𝄞"]


@st.composite
def any_tokens(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Texts as single bytes, whole or cut anywhere, bytes that begin or continue nothing, words; special tokens, in runs too, and
    between the bytes of a character."""
    ids = ids_of(tokenizer, "lo") * draw(st.booleans())
    specials = ids_of(tokenizer, *SPECIALS)
    others = [
        token_id for token_id in range(tokenizer.get_vocab_size()) if tokenizer.id_to_token(token_id) not in BYTES
    ]
    for _ in range(draw(st.integers(0, 12))):
        match draw(st.sampled_from("ttscbo")):
            case "t":
                text = draw(st.sampled_from(WORDS)).encode()
                run = [draw(st.sampled_from(specials))] * draw(st.sampled_from([0, 0, 0, 1, 9]))
                for token_id in as_bytes(tokenizer, text):
                    ids += [token_id, *run]
            case "s":
                ids += [draw(st.sampled_from(specials))] * draw(st.sampled_from([1, 2, 3, 16, 100]))
            case "c":
                text = draw(st.sampled_from(WORDS)).encode()
                ids += as_bytes(tokenizer, text[: draw(st.integers(0, len(text)))])
            case "b":
                lone = draw(st.sampled_from([b"\x80", b"\xbf", b"\xc0", b"\xe3", b"\xed\xa0", b"\xf0\x9f", b"\xff"]))
                ids += as_bytes(tokenizer, lone * draw(st.sampled_from([1, 2, 9])))
            case _:
                ids.append(draw(st.sampled_from(others)))
    return ids


def certain_text(tokenizer: Tokenizer, ids: Sequence[int], *, is_whole: bool = False) -> str:
    """What the ids say for certain, whatever follows; all of it if they are the whole. The tokenizer's own decoding, but that with
    byte tokens each byte of no character, and no other, is U+FFFD. A character may be incomplete at the end, never further up."""
    runs: list[list[int] | bytes] = []
    has_byte_tokens = any(part["type"] == "ByteFallback" for part in parts(tokenizer.decoder, "decoders"))
    specials = ids_of(tokenizer, *SPECIALS)
    for token_id in (token_id for token_id in ids if token_id not in specials):
        if has_byte_tokens and token_id < 256:
            before = runs.pop() if runs and isinstance(runs[-1], bytes) else b""
            assert isinstance(before, bytes)
            runs.append(before + bytes([token_id]))
        else:
            runs.append([token_id])
    good: list[int] = []
    for index, run in enumerate(runs):
        if not isinstance(run, bytes):
            good += run
            continue
        end = len(run) if is_whole or index + 1 < len(runs) else utf_8_decode(run, "replace", False)[1]
        text = run[:end].decode("utf-8", "surrogateescape")
        text = "".join("\ufffd" if "\udc80" <= character <= "\udcff" else character for character in text)
        good += text.encode()
    text = str(tokenizer.decode(good))
    if is_whole or not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return text
    letters = "".join(str(tokenizer.id_to_token(token_id)) for token_id in good)
    raw = bytes(map(byte_letters().index, letters))
    return text[:-1] if utf_8_decode(raw, "replace", False)[1] < len(raw) else text


@settings(max_examples=30)
@given(data=st.data())
def test_after_each_token_the_text_is_all_that_is_certain(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """However prompt and answer are cut, also without a prompt, and whatever bytes: nothing of the prompt comes again, U+FFFD is a
    character like others, and no more than the bytes of one incomplete character are held back."""
    ids = data.draw(any_tokens(tokenizer))
    split = data.draw(st.integers(0, len(ids)))
    decoder = TextDecoder(tokenizer, ids[:split], [])
    said = certain_text(tokenizer, ids[:split])
    for end in range(split + 1, len(ids) + 1):
        said += decoder.add(ids[end - 1])
        assert said == certain_text(tokenizer, ids[:end])
    assert said + decoder.finish() == certain_text(tokenizer, ids, is_whole=True)


@settings(max_examples=16)
@given(data=st.data())
def test_a_text_with_its_prompt_is_the_tokenizers_own(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Of texts, which have no bad bytes: echoed prompt and answer are what decoding all tokens at once gives."""
    whole = "".join(data.draw(st.lists(st.sampled_from(WORDS), max_size=8)))
    ids = [*ids_of(tokenizer, "lo"), *as_bytes(tokenizer, whole.encode())]
    split = data.draw(st.integers(1, len(ids)))
    text = "".join(pieces_of(TextDecoder(tokenizer, ids[:split], [], echo=True), ids[split:]))
    assert text == tokenizer.decode(ids)


@settings(max_examples=24)
@given(data=st.data())
def test_a_text_goes_up_to_the_first_stop_string_of_the_answer(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """However the tokens cut it; also one with U+FFFD, where the prompt has that too. One that is complete with an early token is
    text; one that begins there and is complete later ends the text."""
    letters = st.lists(st.sampled_from("abc"), max_size=30)
    prompt, answer = ("".join(data.draw(st.lists(st.sampled_from(WORDS), max_size=6) | letters)) for _ in range(2))
    some = st.sampled_from(["\ufffd", "\ufffd au", "日", "e\u0301", "\u200d👩", "lo"])
    stops = data.draw(st.lists(some | st.text("abc", min_size=2, max_size=4), min_size=1, max_size=2))
    before = [*ids_of(tokenizer, "lo"), *as_bytes(tokenizer, prompt.encode())]
    ids = as_bytes(tokenizer, answer.encode())
    plain = tokenizer.decode([*before, *ids])[len(tokenizer.decode(before)) :]
    places = [(at + len(stop), at) for stop in stops for at in range(len(plain)) if plain.startswith(stop, at)]
    nums_tokens = [len(plain[:end].encode()) for end, _ in places]
    min_tokens = data.draw(st.sampled_from([0, *nums_tokens]))
    met = [place for place, num_tokens in zip(places, nums_tokens, strict=True) if num_tokens > min_tokens]
    _, end = min(met, default=(0, len(plain)))
    decoder = TextDecoder(tokenizer, before, stops, min_tokens=min_tokens)
    assert "".join(pieces_of(decoder, ids)) == plain[:end]


@pytest.mark.parametrize("token", ["</s>", "▁", "nothing", "out of the vocabulary"])
def test_the_window_stays_small_whatever_has_no_text(token: str) -> None:
    """A run of special tokens, of spaces that a decoder strips at the end, of tokens that are always empty: each step decodes
    a bounded number of tokens."""
    tokenizer = sentencepiece(
        decoders.Sequence([
            decoders.Replace("▁", " "), decoders.Replace("nothing", ""), decoders.Fuse(),
            decoders.Replace(Regex("^ | +$"), ""),
        ])
    )  # fmt: skip
    tokenizer.add_tokens(["nothing"])
    hello, word = ids_of(tokenizer, "▁hello", "▁world")
    silent = 10_000 if token == "out of the vocabulary" else ids_of(tokenizer, token)[0]
    decoder = TextDecoder(tokenizer, [hello], [])
    for _ in range(500):
        assert decoder.add(silent) == ""
        assert len(decoder._decoder._ids) <= MAX_WINDOW_TOKENS
    assert decoder.add(word).endswith("world")


# -- texts that end or move, by tokens that are bytes


@given(
    ids=st.lists(st.integers(0, 262), max_size=30),
    stops=st.lists(st.text("ab€ hello", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 8),
)
@example(ids=[*"a€𝄞é€b".encode()], stops=[], min_tokens=0).via("characters of several tokens")
@example(ids=[*b"abcabdabce!"], stops=["abce", "bcx"], min_tokens=0).via("a stop string, and beginnings of it before")
@example(ids=[*"x€€𝄞y".encode()], stops=["€𝄞"], min_tokens=0).via("a stop string of such characters")
@example(ids=[0x80] * 9 + [0xE2, 0x82] + [257] * 3, stops=[], min_tokens=0).via("bytes that make no character")
@example(ids=[*"xabxabxabx€ab".encode()], stops=["xab"], min_tokens=4).via("a stop string that comes too early")
def test_any_tokens_go_on_as_if_they_had_not_moved(
    llama: Tokenizer, ids: list[int], stops: list[str], min_tokens: int
) -> None:
    """Wherever they are cut: also inside a character, and where the beginning of a stop string is held back. Delivered tokens count
    towards min_tokens."""
    prompt = [256, *b"say: \xe2"]
    undisturbed = pieces_of(TextDecoder(llama, prompt, stops, min_tokens=min_tokens), ids)
    for split in range(max(1, len(undisturbed) - 1)):
        moved = TextDecoder(llama, [*prompt, *ids[:split]], stops, num_delivered=split, min_tokens=min_tokens)
        assert pieces_of(moved, ids[split:]) == undisturbed[split:]


def test_of_a_long_delivered_text_only_the_end_is_decoded_again(llama: Tokenizer) -> None:
    ids = list("ab€".encode()) * MAX_REPLAYED_TOKENS
    whole = TextDecoder(llama, [], ["€abx"])
    for token_id in ids:
        whole.add(token_id)
    moved = TextDecoder(llama, ids, ["€abx"], num_delivered=len(ids))
    assert pieces_of(moved, list(b"ay")) == pieces_of(whole, list(b"ay")) == ["", "€ay", ""]


def test_min_tokens_count_delivered_ones_that_are_not_decoded_again(llama: Tokenizer) -> None:
    ids = list(b"ab") * MAX_REPLAYED_TOKENS
    moved = TextDecoder(llama, ids, ["xy"], num_delivered=len(ids), min_tokens=len(ids) + 2)
    assert pieces_of(moved, list(b"xyzxyz")) == ["", "xy", "z", "", ""]
    assert moved.is_stopped


def test_echo_is_before_a_stop_string_and_not_looked_through(llama: Tokenizer) -> None:
    """A stop string in the prompt does not end the answer, nor does one that begins in the prompt."""
    decoder = TextDecoder(llama, list(b"abxa"), ["ab"], echo=True)
    assert pieces_of(decoder, list(b"bab")) == ["abxab", "", ""]
    assert decoder.is_stopped


def test_a_continuation_echoes_nothing(llama: Tokenizer) -> None:
    decoder = TextDecoder(llama, list(b"abc"), [], num_delivered=1, echo=True)
    assert pieces_of(decoder, list(b"d")) == ["d", ""]
