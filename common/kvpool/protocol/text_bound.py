"""Bounds the length of a text by its number of tokens.

A text can be refused before it is tokenised only if each token covers a bounded number of bytes. Most tokenizers of language models
have that property; it is derived here from their parts, with a list of those that never drop a byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models

from kvpool.protocol.byte_level import byte_letters

NORMAL_FORM_FACTOR = 4
"""A Unicode normal form leaves at least a quarter of a text's bytes: NFC makes 2 bytes of 7, NFKC 1 of 4."""

MAX_CHARACTER_BYTES = 4

SHORTENING_FACTOR = 16
"""The bound is this much larger for a tokenizer that may drop text (collapses spaces, fuses unknown characters)."""

MIN_SHORTENED_BYTES = 1 << 20
"""Smallest bound for such a tokenizer: a text of this size is tokenised in under a second."""

_UTF8_BYTES = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
"""Bytes that occur in UTF-8."""

_LOSSLESS_PRE_TOKENIZERS = {"ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts"}
_NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}


class TextBound(NamedTuple):
    """Longest text. A longer one has more tokens than allowed, unless the tokenizer drops text."""

    max_bytes: int
    """Bytes of the text in UTF-8."""
    uncounted: bytes = b""
    """Byte values that do not count, because the vocabulary lacks them and the tokenizer drops them."""

    def excess(self, text: str) -> int | None:
        """Return the number of counted bytes of a text that is too long; None if it is not."""
        if 4 * len(text) <= self.max_bytes:
            return None
        encoded = text.encode()
        if len(encoded) <= self.max_bytes:
            return None
        num_counted = len(encoded.translate(None, self.uncounted))
        return num_counted if num_counted > self.max_bytes else None


class TextMeasure(NamedTuple):
    """The ratio of bytes to tokens of one tokenizer."""

    bytes_per_token: int
    """Most bytes that one token covers."""
    dropped: bytes | None
    """See `TextBound.uncounted`; None: it may drop more than single bytes, or fuse them."""

    def bound(self, num_tokens: int) -> TextBound:
        """Return the bound of texts of at most `num_tokens` tokens."""
        max_bytes = num_tokens * self.bytes_per_token
        if self.dropped is None:
            return TextBound(max(SHORTENING_FACTOR * max_bytes, MIN_SHORTENED_BYTES))
        return TextBound(max_bytes, self.dropped)


def text_measure(tokenizer: Tokenizer) -> TextMeasure:
    """Measure a tokenizer. Takes some milliseconds, since it reads the vocabulary."""
    normalizers = list(parts(tokenizer.normalizer, "normalizers"))
    pretokenizers = list(parts(tokenizer.pre_tokenizer, "pretokenizers"))
    is_byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *pretokenizers))
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder().values()
    # A byte-level vocabulary writes each byte as one letter; the others write a token as in the text.
    longest_token = max((len(token) if is_byte_level else len(token.encode()) for token in vocabulary), default=1)
    longest_token = max(longest_token, MAX_CHARACTER_BYTES, *(len(token.content.encode()) for token in added))
    num_forms = sum(part["type"] in _NORMAL_FORMS for part in normalizers)
    bytes_per_token: int = longest_token * NORMAL_FORM_FACTOR**num_forms
    dropped = _dropped_bytes(tokenizer, vocabulary, is_byte_level)
    is_exact = (
        all(_is_lossless_normalizer(part) for part in normalizers)
        and all(_is_lossless_pretokenizer(part) for part in pretokenizers)
        and dropped is not None
        # A normal form may produce a dropped byte from others.
        and not (dropped and num_forms)
        # Such tokens absorb the spaces before or after them.
        and not any(token.lstrip or token.rstrip for token in added)
    )
    return TextMeasure(bytes_per_token, dropped if is_exact else None)


def parts(component: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder, as in tokenizer.json. `name`: field of a Sequence that has its
    steps."""

    def flatten(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if part["type"] == "Sequence":
            for inner in part[name]:
                yield from flatten(inner)
        else:
            yield part

    if component is not None:
        yield from flatten(json.loads(component.__getstate__()))


def _is_lossless_normalizer(part: dict[str, Any]) -> bool:
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(pattern.encode()) <= len(part["content"].encode())
    return part["type"] in _NORMAL_FORMS | {"Prepend", "ByteLevel"}


def _is_lossless_pretokenizer(part: dict[str, Any]) -> bool:
    if part["type"] in ("Split", "Punctuation"):
        return bool(part["behavior"] != "Removed")
    return part["type"] in _LOSSLESS_PRE_TOKENIZERS


def _dropped_bytes(tokenizer: Tokenizer, vocabulary: dict[str, int], is_byte_level: bool) -> bytes | None:
    """Return the UTF-8 bytes that no token has and that are dropped one by one. None: more may be dropped, or any number of bytes
    fused into one unknown token."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return None
    if model.unk_token in vocabulary and not model.fuse_unk:
        return b""
    if is_byte_level and model.unk_token is None:
        return bytes(
            byte for byte, letter in enumerate(byte_letters()) if byte in _UTF8_BYTES and letter not in vocabulary
        )
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in _UTF8_BYTES):
        return b""
    return None
