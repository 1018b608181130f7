"""The tensors of the KV cache."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from ...attention.layer import KVLayer
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
        except (RuntimeError, OSError) as error:  # torch's out-of-memory error on every device, and the kernel's
            raise KVCacheTooLarge(
                f"{device} could not allocate {show_bytes(plan.total_bytes)} for the KV cache: {error}. "
                "Give a smaller --kv-cache-memory or --num-blocks."
            ) from error

    def fill(self, value: float) -> None:
        """Overwrite every slot outside the null block: what no sequence has written may be anything. For tests."""
        for layer in self.layers:
            layer.k_cache[1:].fill_(value)
            layer.v_cache[1:].fill_(value)


def _zeros_on_demand(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take memory only where they are touched. torch.zeros writes them all, which takes seconds for a few GiB, and a
    laptop's memory for blocks that nobody uses yet. Pages of the kernel's own, not calloc's, which may hand out (and must clear)
    what the heap has left over; they begin at a page, and go back when the tensor does."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: a gather of blocks then misses the TLB less
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
