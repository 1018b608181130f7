"""Numbers for tenants' salts: displays need to distinguish them, and must not learn them."""

from __future__ import annotations

from typing import Final

LAST: Final = 65_535
"""Shared by all salts that have no number of their own."""


class SaltNumbers:
    """Numbers the salts in the order in which they are first asked for, from 1; the empty salt is 0."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}

    def number(self, salt: str) -> int:
        """The number of a salt; LAST for those after the first LAST − 1, which are not kept."""
        number = self._numbers.get(salt)
        if number is None:
            number = len(self._numbers)
            if number >= LAST:
                return LAST
            self._numbers[salt] = number
        return number
