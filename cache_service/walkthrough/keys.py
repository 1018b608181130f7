"""Keys of a terminal: from bytes to what they mean here."""

from __future__ import annotations

from enum import Enum
from typing import Final


class Key(Enum):
    """What a key press asks for."""

    FORWARDS = "forwards"
    BACKWARDS = "backwards"
    FIRST = "first"
    LAST = "last"
    UP = "up"
    DOWN = "down"
    QUIT = "quit"
    INTERRUPT = "interrupt"
    SUSPEND = "suspend"


ESCAPE: Final = b"\x1b"

_PLAIN: Final = {
    b" ": Key.FORWARDS,
    b"\n": Key.FORWARDS,
    b"\r": Key.FORWARDS,
    b"n": Key.FORWARDS,
    b"b": Key.BACKWARDS,
    b"\x7f": Key.BACKWARDS,
    b"\x08": Key.BACKWARDS,
    b"q": Key.QUIT,
    b"\x04": Key.QUIT,  # Ctrl-D, and the end of what a script types
    ESCAPE: Key.QUIT,
    b"\x03": Key.INTERRUPT,
    b"\x1a": Key.SUSPEND,
}
# After "ESC [" or "ESC O", as the various terminals send them.
_SEQUENCES: Final = {
    b"C": Key.FORWARDS,
    b"6~": Key.FORWARDS,
    b"D": Key.BACKWARDS,
    b"5~": Key.BACKWARDS,
    b"H": Key.FIRST,
    b"1~": Key.FIRST,
    b"7~": Key.FIRST,
    b"F": Key.LAST,
    b"4~": Key.LAST,
    b"8~": Key.LAST,
    b"A": Key.UP,
    b"B": Key.DOWN,
}


def parse_keys(data: bytes) -> tuple[list[Key], bytes]:
    """The keys in `data`, and what is left at its end: an escape that may be a key or may begin one.

    All other bytes are skipped.
    """
    keys: list[Key | None] = []
    while data:
        if data[:1] != ESCAPE:
            keys.append(_PLAIN.get(data[:1].lower()))
            data = data[1:]
        elif data[1:2] not in (b"", b"[", b"O"):
            # Alt and a key, or Escape and then a key: they look the same, and only Escape has a meaning here.
            keys.append(Key.QUIT)
            data = data[1:]
        else:
            # Parameters are digits and semicolons; the first other byte ends the sequence.
            end = next((at for at in range(2, len(data)) if not 0x30 <= data[at] <= 0x3F), None)
            if end is None:
                break
            keys.append(_SEQUENCES.get(data[2 : end + 1]))
            data = data[end + 1 :]
    return [key for key in keys if key is not None], data
