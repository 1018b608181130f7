"""Boundaries: places in a text, in blocks, after which groups whose layers do not see all of it keep what others need to go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class KeptBoundaries:
    """Boundaries, in blocks, that somebody has asked for: some, and the multiples of an interval, if that is not 0."""

    __slots__ = ("_interval", "_some")

    def __init__(self, some: Iterable[int] = (), interval: int = 0) -> None:
        self._some = frozenset(some)
        self._interval = interval

    def __contains__(self, boundary: int) -> bool:
        return boundary in self._some or bool(self._interval and boundary % self._interval == 0)

    def between(self, first: int, last: int) -> Iterator[int]:
        """Those of first … last: the single ones, in order, then the multiples."""
        yield from sorted(boundary for boundary in self._some if first <= boundary <= last)
        if self._interval:
            yield from range(-(-first // self._interval) * self._interval, last + 1, self._interval)


NONE_KEPT = KeptBoundaries()
