"""The tensors of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...attention.layer import KVLayer
from ...pages import zero_pages
from ..errors import KVCacheTooLarge
from .kv_plan import KVCachePlan, show_bytes
from .layers import AttentionLayer


class KVCache:
    """The KV tensors of all layers, allocated once and zero."""

    def __init__(
        self, plan: KVCachePlan, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.plan = plan
        shape = (plan.num_blocks, plan.block_size)
        zeros = _zeros_on_demand if device.type == "cpu" else torch.zeros
        try:
            self.layers = [
                KVLayer(
                    group=0,
                    window=layer.window,
                    k_cache=zeros(*shape, layer.num_kv_heads, layer.k_head_dim, dtype=dtype, device=device),
                    v_cache=zeros(*shape, layer.num_kv_heads, layer.v_head_dim, dtype=dtype, device=device),
                )
                for layer in layers
            ]
        except (RuntimeError, OSError) as error:  # out of memory: torch's errors, and the kernel's
            raise KVCacheTooLarge(
                f"{device} could not allocate {show_bytes(plan.total_bytes)} for the KV cache: {error}. "
                "Give a smaller --kv-cache-memory or --num-blocks."
            ) from error

    def fill(self, value: float) -> None:
        """Overwrite every slot outside the null block: unwritten slots may have any value. For the self-check and tests."""
        for layer in self.layers:
            layer.k_cache[1:].fill_(value)
            layer.v_cache[1:].fill_(value)


def _zeros_on_demand(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return zero_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
