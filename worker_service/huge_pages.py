"""Zeros on the CPU that take memory only once they are written, in huge pages where the system has them."""

from __future__ import annotations

import mmap

import torch

_HUGE_PAGE = 2 << 20


def zero_pages(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8, from the start of a huge page on if they fill one; unmapped with the last tensor that shares it.

    Raises OSError if the system refuses.

    Weights and KV are read once in each step. In pages of 4 KiB a read waits for a page's address every 64 cache lines, and the
    CPU's prefetcher stops at each page's end: a step of one token took a third longer (docs/BENCHMARKS.md).

    torch.zeros writes all of it at once: seconds for a few GiB, and memory for what is never used; calloc may return memory of the
    heap, which it has to clear. So it is mapped.
    """
    skipped = _HUGE_PAGE if num_bytes >= _HUGE_PAGE else 0  # at most
    memory = mmap.mmap(-1, num_bytes + skipped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if skipped and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux, and a kernel that was built with them
        memory.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    first = -room.data_ptr() % _HUGE_PAGE if skipped else 0
    return room[first : first + num_bytes]
