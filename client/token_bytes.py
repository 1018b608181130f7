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
    """Of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = {part["type"] for part in parts(tokenizer.decoder, "decoders")}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_fallback = "ByteFallback" in kinds
        self._marks_spaces = bool(kinds & {"Metaspace", "Replace"})
        added = tokenizer.get_added_tokens_decoder()
        self._special = {index: token.content for index, token in added.items() if token.special}

    def of(self, token_id: int) -> bytes:
        """The bytes that the token stands for; those of a special token's name; none for an id that the vocabulary lacks."""
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

    def is_of(self, tokenizer: Tokenizer) -> bool:
        """Whether it is of this very object."""
        return self._tokenizer is tokenizer

    def num_stripped(self, token_ids: Sequence[int]) -> int:
        """Spaces before the first word that a text which begins with these tokens lacks, though they are among their bytes."""
        whole = b"".join(self.of(one) for one in token_ids if not self.is_special(one)).decode(errors="replace")
        text: str = self._tokenizer.decode(list(token_ids))
        return max(0, _num_first_spaces(whole) - _num_first_spaces(text))

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of texts."""
        return token_id in self._special

    def decoder(self) -> codecs.IncrementalDecoder:
        """From bytes to text, as a worker decodes them: of bytes that make no character, byte-level BPE has one U+FFFD for as many
        as might have begun one, and byte fallback one for each."""
        return codecs.getincrementaldecoder("utf-8")(_EACH_BYTE if self._has_fallback else "replace")


def _num_first_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))
