"""Escapes text of other processes, so that it has no effect on a terminal, a log or a table."""

from __future__ import annotations


def printable(text: str, unescaped: str = "") -> str:
    """Return a name or sentence of another process as one line without effect on the terminal. Characters that are not printable
    (control characters, line ends, marks that turn the direction of writing) are escaped as Python would write them, unless they
    are `unescaped`."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in unescaped else character.encode("unicode_escape").decode()
        for character in text
    )


def printable_lines(text: str) -> str:
    """Do the same for a text of several lines: line ends and tabs stay."""
    return printable(text, "\n\t")
