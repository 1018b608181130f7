"""What bytes of a terminal mean."""

from __future__ import annotations

import pytest

from kvpool.cache_service.walkthrough.keys import Key, parse_keys


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"n b", [Key.FORWARDS, Key.FORWARDS, Key.BACKWARDS]),
        (b"\x1b[C\x1b[D\x1b[5~\x1b[6~", [Key.FORWARDS, Key.BACKWARDS, Key.BACKWARDS, Key.FORWARDS]),
        (b"\x1b[H\x1b[F\x1b[7~\x1b[8~", [Key.FIRST, Key.LAST, Key.FIRST, Key.LAST]),
        (b"\x1b[A\x1bOB", [Key.UP, Key.DOWN]),
        (b"\x1bq", [Key.QUIT, Key.QUIT]),
        (b"xyz\x1b[15~\x1b[1;5P\xc3\xa9q", [Key.QUIT]),
    ],
)
def test_bytes_become_keys(data: bytes, keys: list[Key]) -> None:
    """Whole sequences; what means nothing is skipped and does not swallow what follows."""
    assert parse_keys(data) == (keys, b"")


@pytest.mark.parametrize("data", [b"\x1b", b"\x1b[", b"\x1bO", b"\x1b[1", b"\x1b[1;"])
def test_an_unfinished_sequence_is_kept_for_the_bytes_to_come(data: bytes) -> None:
    """A slow line may cut a key in two."""
    assert parse_keys(b"n" + data) == ([Key.FORWARDS], data)
