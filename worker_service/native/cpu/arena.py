"""Memory of packed weights, one after the other."""

from __future__ import annotations

import torch

from ...huge_pages import zero_pages

_CHUNK = 64 << 20
"""Bytes mapped at a time; what is not used takes no memory."""
_ALIGNMENT = 64
"""Bytes: a cache line, and a vector of AVX-512."""


class Arena:
    """Zeroed tensors in few large mappings, which live as long as their tensors.

    Tensors that are read one after the other should be asked for in this order: what a step prefetches after the end of one is then
    the next. And most are smaller than a huge page.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """[count], at a multiple of 64 bytes. Raises OSError if the system has no memory."""
        size = count * dtype.itemsize
        if self._used + size > len(self._chunk):
            self._chunk, self._used = zero_pages(max(size, _CHUNK)), 0
        found = self._chunk[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return found.view(dtype)
