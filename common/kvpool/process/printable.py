"""Escapes text of other processes, so that it has no effect on a terminal, a log or a table."""

from __future__ import annotations

from collections.abc import Set
from typing import Final

_LINE_CHARACTERS: Final = frozenset("\n\t")


def printable(text: str) -> str:
    """Return a name or sentence of another process as one line without effect on the terminal. Characters that are not printable
    (control characters, line ends, marks that turn the direction of writing) are escaped as Python would write them."""
    return _escaped(text, frozenset())


def printable_lines(text: str) -> str:
    """Do the same for a text of several lines: line ends and tabs stay."""
    return _escaped(text, _LINE_CHARACTERS)


def _escaped(text: str, unescaped: Set[str]) -> str:
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in unescaped else character.encode("unicode_escape").decode()
        for character in text
    )
