"""A tokenizer for people, with one token for each word, and lists of blocks in sentences."""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.cache_service.core.messages import TOKEN_BYTES


class Words:
    """Numbers words in the order in which they are first seen."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str) -> bytes:
        """Return the token ids of a text, packed as in messages."""
        return b"".join(self._id(word).to_bytes(TOKEN_BYTES, "little") for word in text.split())

    def decode(self, tokens: bytes | bytearray) -> tuple[str, ...]:
        """Return the words of packed token ids."""
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
    """Write block ids for a sentence: 1, 2 and 3."""
    *most, last = map(str, blocks)
    return f"{', '.join(most)} and {last}" if most else last
