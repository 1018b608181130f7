"""Prompts: checked for length first, then tokenised.

A text can be refused before it is tokenised only if each token covers a bounded number of bytes. Most tokenizers of language models
have that property; it is derived here from their parts, with a list of those that never drop a byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models

from .encoder import EncoderSettings, SplitPrompt, split, too_long
from .errors import invalid

NORMAL_FORM_FACTOR = 4
"""A Unicode normal form leaves at least a quarter of a text's bytes: NFC makes 2 bytes of 7, NFKC 1 of 4."""

MAX_CHARACTER_BYTES = 4

SHORTENING_FACTOR = 16
"""The bound is this much larger for a tokenizer that may drop text (collapses spaces, fuses unknown characters)."""

MIN_SHORTENED_BYTES = 1 << 20
"""And at least this: it is tokenised in under a second."""

_UTF8_BYTES = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
"""Bytes that occur in UTF-8."""

_LOSSLESS_PRE_TOKENIZERS = {"ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts"}
_NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}


class PromptEncoder:
    """Checks prompts and tokenises texts for one model. Tokenising blocks and releases the GIL; any thread may do it."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int, encoder: EncoderSettings | None = None) -> None:
        """`max_model_len`: tokens of prompt and answer together; with an `encoder`, which the prompt feeds, of the decoder's text.
        Turns off the tokenizer's truncation and padding, which some files have left over from training."""
        self._tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.encoder = encoder
        self.text_bound = TextBound(0)
        if tokenizer is not None:
            tokenizer.no_truncation()
            tokenizer.no_padding()
            self.text_bound = text_bound(tokenizer, self._most_tokens)

    @property
    def _most_tokens(self) -> int:
        """Of a prompt, an answer's first token included where there is no encoder."""
        return self.max_model_len if self.encoder is None else self.encoder.max_tokens

    @property
    def max_ids(self) -> int:
        """Of a prompt as a request states it, with delivered tokens."""
        return self.max_model_len if self.encoder is None else self.encoder.max_tokens + self.max_model_len

    def check_text(self, text: str) -> None:
        """EngineError if the text cannot be tokenised or is certainly too long. At most a millisecond per megabyte."""
        if self._tokenizer is None:
            raise invalid("prompt", "this model has no tokenizer: send token_ids")
        if (num_bytes := self.text_bound.excess(text)) is not None:
            takes = "for prompt and answer together" if self.encoder is None else "for the encoder"
            setting = "--max-model-len" if self.encoder is None else "--max-encoder-tokens"
            raise invalid(
                "prompt",
                f"the text has {num_bytes} bytes; at most {self.text_bound.max_bytes} can fit into the {self._most_tokens} "
                f"tokens that this worker takes {takes}; shorten the text, or start the workers with a larger {setting}",
            )

    def check_num_tokens(self, num_tokens: int, num_delivered: int = 0) -> None:
        """EngineError if a prompt of this length, of which the last tokens were delivered, is too long or leaves no room for an
        answer."""
        if self.encoder is None:
            self.check_text_begins(num_tokens)
            return
        num_delivered = min(num_delivered, num_tokens)
        if num_tokens - num_delivered > self.encoder.max_tokens:
            raise invalid("prompt", too_long(num_tokens - num_delivered, self.encoder))
        self.check_text_begins(len(self.encoder.decoder_prompt) + num_delivered)

    def check_text_begins(self, num_tokens: int) -> None:
        """EngineError if a text that begins with so many tokens cannot go on."""
        if num_tokens >= self.max_model_len:
            raise invalid(
                "prompt",
                f"{num_tokens} tokens leave no room to generate: this worker takes {self.max_model_len} for "
                f"{'prompt and answer together' if self.encoder is None else 'the text of the decoder'}; shorten "
                "the prompt, or start the workers with a larger --max-model-len",
            )

    def split(self, token_ids: list[int], num_delivered: int) -> SplitPrompt:
        """A prompt, which ends with the delivered tokens, as the two parts of the model take it."""
        return split(token_ids, num_delivered, self.encoder)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds. EngineError if it is too long."""
        self.check_text(text)
        assert self._tokenizer is not None
        # Not encode(): it holds the GIL, which stops the event loop, and computes offsets that are not used.
        (encoding,) = self._tokenizer.encode_batch_fast([text])
        self.check_num_tokens(len(encoding))
        return list(encoding.ids)


class TextBound(NamedTuple):
    """How long a text may be. A longer one has more tokens than allowed, unless the tokenizer drops text."""

    max_bytes: int
    """In UTF-8."""
    uncounted: bytes = b""
    """Bytes that the tokenizer drops, because the vocabulary lacks them."""

    def excess(self, text: str) -> int | None:
        """The number of bytes of a text that is too long; None if it is not."""
        if 4 * len(text) <= self.max_bytes:
            return None
        encoded = text.encode()
        if len(encoded) <= self.max_bytes:
            return None
        num_counted = len(encoded.translate(None, self.uncounted))
        return num_counted if num_counted > self.max_bytes else None


def text_bound(tokenizer: Tokenizer, max_model_len: int) -> TextBound:
    """The bound of texts of at most `max_model_len` tokens."""
    normalizers = list(parts(tokenizer.normalizer, "normalizers"))
    pretokenizers = list(parts(tokenizer.pre_tokenizer, "pretokenizers"))
    is_byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *pretokenizers))
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder().values()
    # A byte-level vocabulary writes each byte as one letter; the others write a token as in the text.
    longest_token = max((len(token) if is_byte_level else len(token.encode()) for token in vocabulary), default=1)
    longest_token = max(longest_token, MAX_CHARACTER_BYTES, *(len(token.content.encode()) for token in added))
    num_forms = sum(part["type"] in _NORMAL_FORMS for part in normalizers)
    max_bytes: int = max_model_len * longest_token * NORMAL_FORM_FACTOR**num_forms
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
    if is_exact and dropped is not None:
        return TextBound(max_bytes, dropped)
    return TextBound(max(SHORTENING_FACTOR * max_bytes, MIN_SHORTENED_BYTES))


def parts(component: Any, name: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, as in tokenizer.json; `name`: the field of a sequence that has them."""

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
    """The UTF-8 bytes that have no token and are dropped one by one; every other one is in some token. None: more may be dropped,
    or any number of bytes fused into one unknown token."""
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


def byte_letters() -> list[str]:
    """The letter for each byte in a byte-level vocabulary, as in GPT-2: printable Latin-1 is itself, the others are U+0100 and up,
    in order."""
    others = iter(range(0x100, 0x200))
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
