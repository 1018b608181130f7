"""Measures a device's speed of memory copies and matrix products, which bound a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

_WARM_UPS = 3
_RUNS = 10


@dataclass(frozen=True, slots=True)
class Speeds:
    """The measured speeds of a device."""

    copy_bytes_per_s: float
    """Of a copy within its memory, in bytes read plus bytes written."""
    products_flop_per_s: float
    """Of a bfloat16 product of square matrices, a multiplication and an addition counted as two."""

    def floor_s(self, num_bytes: float, num_flop: float) -> float:
        """The least time of work with this traffic and computation."""
        return max(num_bytes / self.copy_bytes_per_s, num_flop / self.products_flop_per_s)


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, runs: int = _RUNS) -> float:
    """Seconds of one run: the mean of several, after a warm-up."""
    for _ in range(_WARM_UPS):
        work()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(runs):
        work()
    synchronize(device)
    return (time.perf_counter() - began) / runs


@cache
def measure_speeds(device: torch.device, is_tiny: bool) -> Speeds:
    """Takes a second on a GPU, and 4 GiB of its memory; on the tiny scale the figures are meaningless."""
    num_bytes, size = (1 << 22, 128) if is_tiny else (1 << 31, 8192)
    speeds = Speeds(2 * num_bytes / _copy_s(num_bytes, device), 2 * size**3 / _product_s(size, device))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return speeds


def _copy_s(num_bytes: int, device: torch.device) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return seconds_of(lambda: target.copy_(source), device)


def _product_s(size: int, device: torch.device) -> float:
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return seconds_of(lambda: left @ right, device)
