"""Text of others does nothing when it is shown, and what it was can be read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.process.printable import printable, printable_lines


@pytest.mark.parametrize("text", ["", "plain-1", "größe 3 日本 🤖", "[red]not[/red] \\ 'quoted' \"twice\""])
def test_what_can_be_seen_stays_as_it_is(text: str) -> None:
    assert printable(text) == printable_lines(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x7f\x85\x9b2J", r"\x7f\x85\x9b2J"),
        ("\u202egnp\u2066\u200b\u2028\u2029\ufeff", r"\u202egnp\u2066\u200b\u2028\u2029\ufeff"),
        ("\ud800 \U000e0001", r"\ud800 \U000e0001"),
    ],
)
def test_what_does_something_is_written_out(text: str, shown: str) -> None:
    assert printable(text) == printable_lines(text) == shown


def test_lines_stay_lines_where_a_text_has_them() -> None:
    assert printable("a\n\tb\rc") == r"a\n\tb\rc"
    assert printable_lines("a\n\tb\rc") == "a\n\tb\\rc"


@given(st.text(st.characters()))
def test_nothing_else_comes_out(text: str) -> None:
    assert printable(text).isprintable()
    assert all(character.isprintable() or character in "\n\t" for character in printable_lines(text))
    printable(text).encode()
