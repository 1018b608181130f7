"""From tokens to text, one at a time: what comes out is what decoding the whole gives, and nothing raises."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from kvpool.worker_service.engine.detokenizer import MAX_REPLAYED_TOKENS, TextDecoder

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """A tokenizer as Llama 2 has it: words with ▁ for a space, and single bytes where it has no word."""
    words = ["▁hello", "▁world", "lo", "▁", "é", "€uro", "!"]
    vocabulary = {token: index for index, token in enumerate([*BYTES, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token=None))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def text_of(
    tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, stops: list[str] | None = None
) -> str:
    return "".join(pieces_of(TextDecoder(tokenizer, prompt or [], stops or []), ids))


def test_characters_made_of_several_tokens_come_out_whole(byte_fallback: Tokenizer) -> None:
    """The bytes of €, one token each, give one character, and nothing before the last of them."""
    decoder = TextDecoder(byte_fallback, [], [])
    assert [decoder.add(byte) for byte in "a€".encode()] == ["a", "", "", "€"]


def test_the_first_word_behind_a_prompt_keeps_its_space(byte_fallback: Tokenizer) -> None:
    """Decoded alone, a first word loses its leading space; behind a prompt it must not."""
    hello, world = 256, 257
    assert text_of(byte_fallback, [world], prompt=[hello]) == " world"


def test_a_prompt_that_ends_inside_a_character_is_completed_not_repeated(byte_fallback: Tokenizer) -> None:
    """The answer begins with the character, not with the prompt's own text."""
    first, second, third = "€".encode()
    hello = 256
    assert text_of(byte_fallback, [third, ord("x")], prompt=[hello, first, second]) == "€x"
    assert text_of(byte_fallback, [third, ord("x")], prompt=[*b"yyy", first, second]) == "€x"
    assert text_of(byte_fallback, [third, ord("x")], prompt=[*("€" * 9).encode(), first, second]) == "€x"


def test_bytes_that_stay_incomplete_are_shown_as_such(byte_fallback: Tokenizer) -> None:
    """Nothing is lost at the end of a text, nor behind bytes that never make a character."""
    assert text_of(byte_fallback, [ord("a"), 0xE2]) == "a\ufffd"
    world = 257
    assert text_of(byte_fallback, [0x80] * 20 + [world]) == "\ufffd" * 20 + " world"


@pytest.mark.parametrize("seed", range(30))
def test_any_tokens_whatever_decode_without_raising(byte_fallback: Tokenizer, seed: int) -> None:
    """Also those that no model in its senses produces; what is valid text comes out as decoding the whole gives it."""
    rng = random.Random(seed)
    ids = [rng.randrange(263) for _ in range(200)]
    text_of(byte_fallback, ids, prompt=[rng.randrange(263) for _ in range(8)])
    valid = [byte for _ in range(60) for byte in rng.choice(["a", "é", "€", "𝄞", " "]).encode()]
    assert text_of(byte_fallback, valid) == byte_fallback.decode(valid)


@pytest.mark.parametrize("seed", range(10))
def test_stop_strings_are_found_across_tokens_and_left_out(byte_fallback: Tokenizer, seed: int) -> None:
    """Text up to the first stop string, however the tokens cut it; nothing that begins one is told too early."""
    rng = random.Random(seed)
    whole = "".join(rng.choice("abc") for _ in range(40))
    stops = ["".join(rng.choice("abc") for _ in range(rng.randint(2, 4))) for _ in range(2)]
    cut = min((whole.find(stop) for stop in stops if stop in whole), default=len(whole))
    assert text_of(byte_fallback, list(whole.encode()), stops=stops) == whole[:cut]


def pieces_of(decoder: TextDecoder, ids: Sequence[int]) -> list[str]:
    """What each token makes certain; behind a stop string nothing, behind the last token also what was held back."""
    pieces: list[str] = []
    for token_id in ids:
        pieces.append(decoder.add(token_id))
        if decoder.is_stopped:
            return pieces
    return [*pieces, decoder.finish()]


@given(
    ids=st.lists(st.integers(0, 262), max_size=30),
    stops=st.lists(st.text("ab€ hello", min_size=1, max_size=4), max_size=3),
)
@example(ids=[*"a€𝄞é€b".encode()], stops=[]).via("characters of several tokens")
@example(ids=[*b"abcabdabce!"], stops=["abce", "bcx"]).via("a stop string, and beginnings of it before")
@example(ids=[*"x€€𝄞y".encode()], stops=["€𝄞"]).via("a stop string of such characters")
@example(ids=[0x80] * 9 + [0xE2, 0x82] + [257] * 3, stops=[]).via("bytes that make no character")
def test_any_tokens_go_on_as_if_they_had_not_moved(byte_fallback: Tokenizer, ids: list[int], stops: list[str]) -> None:
    """Wherever they are cut: also inside a character, and where the beginning of a stop string is held back."""
    prompt = [256, *b"say: \xe2"]
    undisturbed = pieces_of(TextDecoder(byte_fallback, prompt, stops), ids)
    for split in range(max(1, len(undisturbed) - 1)):
        moved = TextDecoder(byte_fallback, [*prompt, *ids[:split]], stops, num_delivered=split)
        assert pieces_of(moved, ids[split:]) == undisturbed[split:]


def test_of_a_long_delivered_text_only_the_end_is_decoded_again(byte_fallback: Tokenizer) -> None:
    """What is held back is the same as if all of it were."""
    ids = list("ab€".encode()) * MAX_REPLAYED_TOKENS
    whole = TextDecoder(byte_fallback, [], ["€abx"])
    for token_id in ids:
        whole.add(token_id)
    moved = TextDecoder(byte_fallback, ids, ["€abx"], num_delivered=len(ids))
    assert pieces_of(moved, list(b"ay")) == pieces_of(whole, list(b"ay")) == ["", "€ay", ""]


@pytest.mark.parametrize("seed", range(10))
def test_a_stop_string_counts_from_min_tokens_on(byte_fallback: Tokenizer, seed: int) -> None:
    """One that is complete with an early token is text; one that begins there and is complete later ends the text."""
    rng = random.Random(seed)
    whole = "".join(rng.choice("ab") for _ in range(30))
    stop = "".join(rng.choice("ab") for _ in range(rng.randint(1, 3)))
    for min_tokens in range(12):
        decoder = TextDecoder(byte_fallback, [], [stop], min_tokens=min_tokens)
        text = "".join(pieces_of(decoder, list(whole.encode())))
        ends = [
            begin for begin in range(len(whole)) if whole.startswith(stop, begin) and begin + len(stop) > min_tokens
        ]
        assert text == whole[: min(ends, default=len(whole))]


@pytest.mark.parametrize("min_tokens", [1, 4, 7])
def test_min_tokens_count_delivered_ones(byte_fallback: Tokenizer, min_tokens: int) -> None:
    """Wherever a text moves, it ends where it would have ended."""
    prompt, ids = [256], list("xabxabxabx€ab".encode())
    undisturbed = pieces_of(TextDecoder(byte_fallback, prompt, ["xab"], min_tokens=min_tokens), ids)
    for split in range(len(undisturbed)):
        moved = TextDecoder(byte_fallback, [*prompt, *ids[:split]], ["xab"], num_delivered=split, min_tokens=min_tokens)
        assert not moved.is_stopped
        assert pieces_of(moved, ids[split:]) == undisturbed[split:]


def test_min_tokens_count_delivered_ones_that_are_not_decoded_again(byte_fallback: Tokenizer) -> None:
    ids = list(b"ab") * MAX_REPLAYED_TOKENS
    moved = TextDecoder(byte_fallback, ids, ["xy"], num_delivered=len(ids), min_tokens=len(ids) + 2)
    assert pieces_of(moved, list(b"xyzxyz")) == ["", "xy", "z", "", ""]
    assert moved.is_stopped


@given(text=st.text("aé€𝄞 ", max_size=30), data=st.data())
def test_echo_and_answer_are_one_text(byte_fallback: Tokenizer, text: str, data: st.DataObject) -> None:
    """Wherever the prompt ends, also inside a character, nothing is missing or told twice; also if no token comes."""
    ids = [260, *text.encode()]
    split = data.draw(st.integers(1, len(ids)))
    decoder = TextDecoder(byte_fallback, ids[:split], [], echo=True)
    assert "".join(pieces_of(decoder, ids[split:])) == byte_fallback.decode(ids)
    with_echo = "".join(pieces_of(TextDecoder(byte_fallback, ids[:split], [], echo=True), ids[split:]))
    assert with_echo.endswith("".join(pieces_of(TextDecoder(byte_fallback, ids[:split], []), ids[split:])))


def test_echo_is_before_a_stop_string_and_not_looked_through(byte_fallback: Tokenizer) -> None:
    """A stop string in the prompt does not end the answer, nor does one that begins in the prompt."""
    decoder = TextDecoder(byte_fallback, list(b"abxa"), ["ab"], echo=True)
    assert pieces_of(decoder, list(b"bab")) == ["abxab", "", ""]
    assert decoder.is_stopped


def test_a_continuation_echoes_nothing(byte_fallback: Tokenizer) -> None:
    decoder = TextDecoder(byte_fallback, list(b"abc"), [], num_delivered=1, echo=True)
    assert pieces_of(decoder, list(b"d")) == ["d", ""]
