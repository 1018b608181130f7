"""The bytes of single tokens, as the tokenizer's vocabulary has them.

Decoding one token loses the bytes of half a character. The vocabulary has them in one of three spellings: byte-level BPE writes
each byte as a letter of its own alphabet (`kvpool.protocol.byte_level`); SentencePiece writes ▁ for a space and, with byte
fallback, <0xE9> for a byte; other vocabularies have text, whose pieces are decoded one by one.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

from kvpool.protocol.byte_level import spelled_bytes
from kvpool.protocol.text_bound import parts

_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EACH_BYTE: Final = "kvpool.each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class TokenBytes:
    """The bytes of one tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = {part["type"] for part in parts(tokenizer.decoder, "decoders")}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_fallback = "ByteFallback" in kinds
        self._marks_spaces = bool(kinds & {"Metaspace", "Replace"})
        added = tokenizer.get_added_tokens_decoder()
        self._special = {index: token.content for index, token in added.items() if token.special}

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token: of its name if it is special, none if the vocabulary lacks the id."""
        special = self._special.get(token_id)
        if special is not None:
            return special.encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            return spelled_bytes(piece)
        if self._has_fallback and (match := _FALLBACK.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        if self._marks_spaces:
            return piece.replace("▁", " ").encode()
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def num_stripped(self, token_ids: Sequence[int]) -> int:
        """Count the leading spaces that are in the bytes of these tokens, but not in the text that the tokenizer decodes from
        them."""
        whole = b"".join(self.of(token_id) for token_id in token_ids if not self.is_special(token_id)).decode(
            errors="replace"
        )
        text: str = self._tokenizer.decode(list(token_ids))
        return max(0, _num_first_spaces(whole) - _num_first_spaces(text))

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of texts."""
        return token_id in self._special

    def decoder(self) -> codecs.IncrementalDecoder:
        """Return a decoder from bytes to text that works as a worker does. For bytes that make no character, byte-level BPE writes
        one U+FFFD for as many as might have begun one, and byte fallback writes one for each."""
        return codecs.getincrementaldecoder("utf-8")(_EACH_BYTE if self._has_fallback else "replace")


def _num_first_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))
