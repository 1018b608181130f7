"""Text of others that is to be seen: it must do nothing to a terminal, a log or a table."""

from __future__ import annotations

from collections.abc import Set
from typing import Final

_LINE_CHARACTERS: Final = frozenset("\n\t")


def printable(text: str) -> str:
    """A name or sentence out of another process, as one line that does nothing to the terminal: what is no visible character
    (control characters, line ends, marks that turn the direction of writing) is written as Python would write it."""
    return _escaped(text, frozenset())


def printable_lines(text: str) -> str:
    """The same for a text of several lines: ends of lines and tabs stay."""
    return _escaped(text, _LINE_CHARACTERS)


def _escaped(text: str, kept: Set[str]) -> str:
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in kept else character.encode("unicode_escape").decode()
        for character in text
    )
