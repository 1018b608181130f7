"""Counts observed values by size. No I/O, no lock, no registry: /metrics reads it when it is requested."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """The number of values in each bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the largest value of each bucket, ascending; one more bucket takes all larger values."""
        assert list(bounds) == sorted(set(bounds)), bounds
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0
        """Sum of all values, in their unit."""

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (bound, number of values up to it) for each bucket; the last bound is infinite."""
        return list(zip((*self._bounds, float("inf")), accumulate(self._counts), strict=True))
