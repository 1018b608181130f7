"""One token per word: a tokenizer for people, and how a sentence names blocks."""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.cache_service.core.messages import TOKEN_BYTES


class Words:
    """Words numbered in the order in which they are first seen."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str) -> bytes:
        """The token ids of a text, as they travel."""
        return b"".join(self._id(word).to_bytes(TOKEN_BYTES, "little") for word in text.split())

    def decode(self, tokens: bytes | bytearray) -> tuple[str, ...]:
        """The words of token ids."""
        return tuple(
            self._words[int.from_bytes(tokens[begin : begin + TOKEN_BYTES], "little")]
            for begin in range(0, len(tokens), TOKEN_BYTES)
        )

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]


def listed(blocks: Iterable[int]) -> str:
    """Block ids as a sentence names them: 1, 2 and 3."""
    *most, last = map(str, blocks)
    return f"{', '.join(most)} and {last}" if most else last
