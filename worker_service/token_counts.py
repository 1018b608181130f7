"""The tokens of one sequence, counted as they come."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

import numpy as np
import numpy.typing as npt

_MIN_CAPACITY = 64


class TokenCounts:
    """The distinct tokens of one sequence, and how often each was generated, for penalties. Grows with every token; counting one is
    O(1)."""

    def __init__(self, prompt: Iterable[int], generated: Iterable[int] = ()) -> None:
        distinct = list(dict.fromkeys(prompt))
        capacity = max(_MIN_CAPACITY, 2 * len(distinct))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(distinct)] = distinct
        self._num_generated = np.zeros(capacity, dtype=np.int64)
        self._index = {token_id: index for index, token_id in enumerate(distinct)}
        for token_id in generated:
            self.add(token_id)

    def copy(self) -> TokenCounts:
        """The counts of a fork that goes on from here."""
        again = copy(self)
        again._ids, again._num_generated = self._ids.copy(), self._num_generated.copy()
        again._index = dict(self._index)
        return again

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[N]: the distinct tokens of prompt and answer. A view, valid until the next `add`."""
        return self._ids[: len(self._index)]

    @property
    def num_generated(self) -> npt.NDArray[np.int64]:
        """[N]: how often each of `ids` occurs in the answer. A view, valid until the next `add`."""
        return self._num_generated[: len(self._index)]

    def add(self, token_id: int) -> None:
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._num_generated = np.concatenate([self._num_generated, np.zeros_like(self._num_generated)])
        self._ids[index] = token_id
        self._num_generated[index] += 1
