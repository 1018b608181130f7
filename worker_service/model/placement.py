"""What is decided of a model before its weights are read: dtype, config, lengths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ..native.cpu import cpu_info
from .errors import ModelError, library_errors
from .length import Regime
from .settings import DTypeName
from .source.files import CONFIG

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Linux's flags of CPUs that multiply bfloat16 in hardware: x86 (AVX512, AMX) and Arm.
_NATIVE_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True)
class Prepared:
    """Decisions before weights are read."""

    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    rope_regime: Regime | None
    max_encoder_tokens: int | None
    """Tokens of the longest input of its encoder; None: it has no encoder."""


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
    """Whether this machine's CPUs compute bfloat16 natively; if not, float32 is faster."""
    return not _NATIVE_BFLOAT16_FLAGS.isdisjoint(cpu_info.flags())


def own_dtype(config: Any) -> torch.dtype | None:
    """The dtype in the model's config, if any."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def read_config(folder: Path, gguf: str | None = None) -> Any:
    """The config in config.json, or in the header of the GGUF file of that name in the folder; reads no weights.

    Raises ModelError if transformers does not support the model, or it has code of its own.
    """
    if gguf is not None:
        # Here and not above: it imports what only GGUF files need.
        from .source.gguf_config import gguf_config, open_gguf

        return gguf_config(open_gguf(folder / gguf))
    what = f"transformers cannot read {folder / CONFIG}"
    with library_errors(what, "Models with their own code are refused."):
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
