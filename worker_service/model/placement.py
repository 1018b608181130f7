"""Device, dtype and longest sequence of a model."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from .errors import ModelError
from .rope import longest_exact
from .settings import DTypeName

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Linux's flags of CPUs that multiply bfloat16 in hardware: x86 (AVX512, AMX) and Arm.
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
    """Make it the calling thread's current CUDA device; no effect for a CPU.

    Each thread has a current device, at first the first GPU. Triton launches kernels there, and graphs are captured there, wherever
    the tensors are: so the thread that runs the model calls this first.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def choose_dtype(dtype: DTypeName, device: torch.device, own: torch.dtype | None) -> torch.dtype:
    """The dtype of weights and KV. `own`: the one in the model's config."""
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
    """Whether this machine's CPU computes bfloat16 natively; if not, float32 is faster."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return flags is not None and not _NATIVE_BFLOAT16_FLAGS.isdisjoint(flags[1].split())


def own_dtype(config: Any) -> torch.dtype | None:
    """The dtype in the model's config, if any."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def read_config(folder: Path, gguf: str | None = None) -> Any:
    """The config in config.json, or in the header of the GGUF file of that name in the folder; reads no weights.

    Raises ModelError if transformers does not support the model, or it has code of its own.
    """
    more = {} if gguf is None else {"gguf_file": gguf}
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **more)
    except (ValueError, OSError) as error:
        raise ModelError(
            f"transformers cannot read {folder / (gguf or 'config.json')}: {error}. Models with their own code are refused."
        ) from error


def choose_max_model_len(config: Any, wanted: int | None) -> int:
    """Tokens of the longest sequence: `wanted`, else the config's limit, or less if longrope is not exact up to there.

    Raises ModelError.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if wanted is None:
        if limit is None:
            raise ModelError(f"The config of {config.model_type} has no longest sequence: give --max-model-len.")
        return min(int(limit), longest_exact(config) or int(limit))
    if wanted < 2 or (limit is not None and wanted > limit):
        raise ModelError(f"--max-model-len {wanted} is not within 2 … {limit}, the limits of the model's config.")
    return wanted
