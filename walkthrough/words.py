"""A tokenizer for people, with one token for each word, and lists of blocks in sentences."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class Words:
    """Numbers words in the order in which they are first seen."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return [self._ids.setdefault(word, len(self._ids)) for word in text.split()]

    def decode(self, tokens: bytes | bytearray) -> tuple[str, ...]:
        """Return the words of token ids that are packed as in messages."""
        words = list(self._ids)
        return tuple(words[token] for token in array("I", bytes(tokens)))


def listed(blocks: Iterable[int]) -> str:
    """Write block ids for a sentence: 1, 2 and 3."""
    *most, last = map(str, blocks)
    return f"{', '.join(most)} and {last}" if most else last
