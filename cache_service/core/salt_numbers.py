"""Salts of tenants as numbers: what may be shown of a secret."""

from __future__ import annotations

MAX_SALTS = 65_534
"""Salts with a number of their own; the others share the next one."""


class SaltNumbers:
    """Numbers salts in the order in which they are met. No salt is 0."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, salt: str) -> int:
        """The same for the same salt, for as long as this object lives."""
        if not salt:
            return 0
        number = self._numbers.get(salt)
        if number is None:
            number = min(len(self._numbers), MAX_SALTS) + 1
            if number <= MAX_SALTS:
                self._numbers[salt] = number
        return number
