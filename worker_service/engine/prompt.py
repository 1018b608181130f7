"""Prompts: measured before anything is made of them, then tokenised.

A text can only be refused unread where each token stands for a bounded number of its bytes. Most tokenizers of language models
have that property; which ones is decided here by their parts, from a list of those that never drop a byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from .errors import invalid

NORMAL_FORM_FACTOR = 4
"""A Unicode normal form shortens a text to a quarter of its bytes at most: NFC makes 2 bytes of 7, NFKC 1 of 4."""

MAX_CHARACTER_BYTES = 4

SHORTENING_FACTOR = 16
"""A tokenizer that may drop text (it collapses spaces, fuses unknown characters) is given this many times as much of it."""

MIN_SHORTENED_BYTES = 1 << 20
"""And never less than this: it is tokenised in under a second."""

_LOSSLESS_PRE_TOKENIZERS = {"ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts"}
_NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}


class PromptEncoder:
    """Measures prompts and tokenises texts for one model. Tokenising is blocking, and releases the GIL; any thread may do it."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        """`max_model_len`: tokens of prompt and answer together. From now on the tokenizer neither truncates nor pads: both are
        left over from training in some files."""
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self.max_text_bytes = 0
        """UTF-8 bytes of the longest text that is tokenised. Any longer one has more than `max_model_len` tokens, unless the
        tokenizer drops text."""
        if tokenizer is not None:
            tokenizer.no_truncation()
            tokenizer.no_padding()
            self.max_text_bytes = max_text_bytes(tokenizer, max_model_len)

    def check_text(self, text: str) -> None:
        """EngineError if the text cannot be tokenised or is certain to be too long. Constant memory, microseconds per megabyte."""
        if self._tokenizer is None:
            raise invalid("prompt", "this model has no tokenizer: send token_ids")
        # A character has at least one byte, so most texts that are too long need not be encoded to be measured.
        num_bytes = len(text) if len(text) > self.max_text_bytes or text.isascii() else len(text.encode())
        if num_bytes > self.max_text_bytes:
            at_least = "" if text.isascii() else "at least "
            raise invalid(
                "prompt",
                f"the text has {at_least}{num_bytes} bytes, and {self.max_text_bytes} are the most that can fit into the "
                f"{self._max_model_len} tokens that this worker takes for prompt and answer together; shorten the text, or start "
                "the workers with a larger --max-model-len",
            )

    def check_num_tokens(self, num_tokens: int) -> None:
        """EngineError if so many tokens leave no room for an answer."""
        if num_tokens >= self._max_model_len:
            raise invalid(
                "prompt",
                f"{num_tokens} tokens leave no room to generate: this worker takes {self._max_model_len} for prompt and answer "
                "together; shorten the prompt, or start the workers with a larger --max-model-len",
            )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer itself adds. EngineError if it is too long."""
        self.check_text(text)
        assert self._tokenizer is not None
        # For a single text too: encode() holds the GIL, which stops the event loop, and keeps offsets that nobody reads.
        (encoding,) = self._tokenizer.encode_batch_fast([text])
        self.check_num_tokens(len(encoding))
        return list(encoding.ids)


def max_text_bytes(tokenizer: Tokenizer, max_model_len: int) -> int:
    """UTF-8 bytes of the longest text that may have no more than `max_model_len` tokens."""
    normalizers = list(_parts(tokenizer.normalizer, "normalizers"))
    pretokenizers = list(_parts(tokenizer.pre_tokenizer, "pretokenizers"))
    is_byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *pretokenizers))
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder().values()
    # In a byte-level vocabulary each letter stands for one byte, elsewhere a token is written as in the text.
    longest_token = max((len(token) if is_byte_level else len(token.encode()) for token in vocabulary), default=1)
    longest_token = max(longest_token, MAX_CHARACTER_BYTES, *(len(token.content.encode()) for token in added))
    num_forms = sum(part["type"] in _NORMAL_FORMS for part in normalizers)
    max_bytes: int = max_model_len * longest_token * NORMAL_FORM_FACTOR**num_forms
    keeps_every_byte = (
        all(_is_lossless_normalizer(part) for part in normalizers)
        and all(_is_lossless_pretokenizer(part) for part in pretokenizers)
        and _has_tokens_for_every_byte(tokenizer, vocabulary, is_byte_level)
        # These swallow the spaces before or after them.
        and not any(token.lstrip or token.rstrip for token in added)
    )
    return max_bytes if keeps_every_byte else max(SHORTENING_FACTOR * max_bytes, MIN_SHORTENED_BYTES)


def _parts(component: Any, name: str) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the steps that it consists of, in the form of a tokenizer.json."""

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


def _has_tokens_for_every_byte(tokenizer: Tokenizer, vocabulary: dict[str, int], is_byte_level: bool) -> bool:
    """Whether no text, whatever its characters, is dropped or fused into one token for what is unknown."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    if is_byte_level and all(letter in vocabulary for letter in pre_tokenizers.ByteLevel.alphabet()):
        return True
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    return model.unk_token in vocabulary and not model.fuse_unk
