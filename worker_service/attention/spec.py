"""The model and device that an attention backend is selected for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layer import LayerNeeds

_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8
_DTYPES = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A model on a device."""

    needs: tuple[LayerNeeds, ...]
    """The distinct needs of its layers."""
    dtype: torch.dtype
    device: torch.device
    block_size: int


def kernel_limits(setting: AttentionSpec) -> str | None:
    """The first FlashAttention limit exceeded, or None."""
    if setting.device.type != "cuda":
        return f"it runs on CUDA devices, not on {setting.device}"
    if setting.dtype not in _DTYPES:
        return f"it computes in float16 and bfloat16, not in {str(setting.dtype).removeprefix('torch.')}"
    for needs in setting.needs:
        if needs.is_cross:
            return "it does not attend to an encoder's output"
        if needs.has_bias:
            return "it adds no bias to scores"
        if needs.k_head_dim != needs.v_head_dim:
            return (
                f"its heads of K and V have the same size, this model's have {needs.k_head_dim} and {needs.v_head_dim}"
            )
        if needs.k_head_dim > _MAX_HEAD_DIM or needs.k_head_dim % _HEAD_DIM_MULTIPLE:
            return (
                f"its head sizes are multiples of {_HEAD_DIM_MULTIPLE} up to {_MAX_HEAD_DIM}, this model's is "
                f"{needs.k_head_dim}"
            )
    return None
