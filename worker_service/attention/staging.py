"""Sends a step's numbers to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .block_tables import IntArray


class Staging:
    """A buffer of int64 numbers, written on the host and read on the device. On a CPU both are the same memory."""

    def __init__(self, device: torch.device, capacity: int = 1) -> None:
        self._device = device
        self._copied: torch.cuda.Event | None = None
        self._lengths: list[int] = []
        """Lengths of the arrays sent last."""
        self._tensors: list[torch.Tensor] = []
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        on_gpu = self._device.type == "cuda"
        self._host = torch.empty(capacity, dtype=torch.int64, pin_memory=on_gpu)
        self._array = self._host.numpy()
        self._lengths = []
        self._there = torch.empty(capacity, dtype=torch.int64, device=self._device) if on_gpu else self._host

    def send(self, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
        """The arrays on the device, in order; valid until the next send. The same tensors for arrays of the same lengths."""
        lengths = [array.size for array in arrays]
        num_numbers = sum(lengths)
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still read the buffer
        if num_numbers > self._host.numel():
            self._allocate(1 << (num_numbers - 1).bit_length())
        np.concatenate(arrays, out=self._array[:num_numbers])
        if self._there is not self._host:
            self._there[:num_numbers].copy_(self._host[:num_numbers], non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self._device))
        if lengths != self._lengths:
            self._lengths = lengths
            self._tensors = list(torch.split(self._there[:num_numbers], lengths))
        return self._tensors
