"""The device of a model, and the forward pass's share of a busy CPU. Imports torch only where it is needed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .errors import ModelError

if TYPE_CHECKING:
    import torch
import os
import sys
import threading


def cuda_index(device: str) -> int | None:
    """N of cuda:N, 0 of cuda; None of auto and cpu. Raises ModelError for anything else; whether the GPU exists is not checked."""
    if device in ("auto", "cpu"):
        return None
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise ModelError(f"Unknown device {device!r}: give auto, cpu, cuda or cuda:N.")
    return int(match[1] or 0)


def choose_device(device: str) -> torch.device:
    """The torch device of auto, cpu, cuda or cuda:N. Raises ModelError."""
    index = cuda_index(device)
    # Here and not above: the import takes a second, which the dry run spends only for a GPU.
    import torch

    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if index is None:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if index >= count:
        raise ModelError(
            f"There is no device {device!r}: torch sees {count} CUDA devices. Give cpu or a smaller number."
        )
    return torch.device("cuda", index)


def enter_device(device: torch.device) -> None:
    """Make the device the calling thread's current CUDA device; no effect for a CPU.

    Each thread has a current device, at first the first GPU. Triton launches kernels there, and graphs are captured there, wherever
    the tensors are: so the thread that runs the model calls this first.
    """
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)


def lower_priority(nice: int) -> None:
    """Raise the nice value of this thread, and of those that it starts, to at least `nice`.

    A forward pass uses the whole CPU for seconds without a pause; heartbeats, streams and a restarting manager need little of it,
    but at once. Only on Linux do threads have priorities of their own; on other systems this has no effect.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))
