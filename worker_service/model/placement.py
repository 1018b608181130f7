"""Which device and which number format a model runs in."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .errors import ModelError
from .settings import DTypeName

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By name."""
# Flags of Linux for CPUs that multiply bfloat16 in hardware: x86 (AVX512, AMX) and Arm.
_NATIVE_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def choose_device(device: str) -> torch.device:
    """The torch device of auto, cpu, cuda or cuda:N."""
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device == "cpu":
        return torch.device("cpu")
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise ModelError(f"Unknown device {device!r}: give auto, cpu, cuda or cuda:N.")
    index, count = int(match[1] or 0), torch.cuda.device_count()
    if index >= count:
        raise ModelError(
            f"There is no device {device!r}: torch sees {count} CUDA devices. Give cpu or a smaller number."
        )
    return torch.device("cuda", index)


def enter_device(device: torch.device) -> None:
    """Make it the calling thread's current CUDA device; does nothing for a CPU.

    The current device belongs to a thread, and is the first GPU until it is set. Triton launches kernels on it, and graphs are
    captured on it, wherever their tensors are: so the thread that runs the model calls this first.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def choose_dtype(dtype: DTypeName, device: torch.device, own: torch.dtype | None) -> torch.dtype:
    """The dtype of weights and KV. `own` is what the model's config names."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ModelError(f"Unknown dtype {dtype!r}: give auto, {', '.join(DTYPES)}.")
        return DTYPES[dtype]
    if device.type == "cpu":
        return torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    return own if own is not None and own in DTYPES.values() else torch.bfloat16


def dtype_name(dtype: torch.dtype) -> str:
    """float32, bfloat16 or float16."""
    return str(dtype).removeprefix("torch.")


@cache
def cpu_has_bfloat16() -> bool:
    """Whether this machine's CPU computes bfloat16 natively; where it does not, float32 is faster."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return flags is not None and not _NATIVE_BFLOAT16_FLAGS.isdisjoint(flags[1].split())


def own_dtype(config: Any) -> torch.dtype | None:
    """The dtype that the model's config names, if any."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None
