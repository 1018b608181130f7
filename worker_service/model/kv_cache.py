"""How large the KV cache is, and its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..attention.layer import KVLayer
from .errors import KVCacheTooLarge, ModelError
from .layers import AttentionLayer

DEFAULT_SHARE_OF_FREE_MEMORY = {"cpu": 0.2, "cuda": 0.85}
"""Taken where neither a size nor a number of blocks is given. Small on a CPU: other workers share its memory."""
_ALIGNMENT = 64
"""Of tensors, in bytes, as torch's own allocator has it."""
_MIN_BLOCKS = 2
"""The null block and one that can be used."""


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """Size of a KV cache before anything is allocated."""

    num_blocks: int
    """Including the null block."""
    block_size: int
    """Tokens per block."""
    bytes_per_token: int
    """K and V of all layers."""

    @property
    def capacity(self) -> int:
        """Blocks that can hold KV."""
        return self.num_blocks - 1

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.bytes_per_token

    def describe(self, max_model_len: int) -> str:
        """One line for the log."""
        tokens = self.capacity * self.block_size
        blocks_per_sequence = -(-max_model_len // self.block_size)
        return (
            f"KV cache: {_bytes(self.total_bytes)}, {self.capacity:,} blocks of {self.block_size} tokens = {tokens:,} "
            f"tokens; at {max_model_len:,} tokens per sequence {self.capacity / blocks_per_sequence:.2f} at once"
        )


def plan_kv_cache(
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    device: torch.device,
    free_bytes: int,
    block_size: int,
    num_blocks: int | None = None,
    kv_cache_memory_bytes: int | None = None,
) -> KVCachePlan:
    """The size asked for by number of blocks or by bytes (at most one of them), else the default share of free_bytes.

    Raises ModelError for settings that make no sense and KVCacheTooLarge, which names the largest cache that fits.
    """
    if block_size < 1 or block_size & (block_size - 1):
        raise ModelError(f"The block size must be a power of two, not {block_size}.")
    if num_blocks is not None and kv_cache_memory_bytes is not None:
        raise ModelError("Give the size of the KV cache as a number of blocks or in bytes, not both.")
    bytes_per_token = sum(layer.num_kv_heads * (layer.k_head_dim + layer.v_head_dim) for layer in layers)
    bytes_per_token *= dtype.itemsize
    bytes_per_block = bytes_per_token * block_size
    if num_blocks is None:
        share = DEFAULT_SHARE_OF_FREE_MEMORY[device.type]
        budget = int(free_bytes * share) if kv_cache_memory_bytes is None else kv_cache_memory_bytes
        num_blocks = budget // bytes_per_block
    plan = KVCachePlan(num_blocks, block_size, bytes_per_token)
    if num_blocks < _MIN_BLOCKS:
        raise ModelError(
            f"A KV cache of {num_blocks} blocks is too small: at least {_MIN_BLOCKS} are needed (block 0 stays empty), "
            f"{_bytes(_MIN_BLOCKS * bytes_per_block)} at {_bytes(bytes_per_block)} per block of {block_size} tokens. "
            "Give a larger --kv-cache-memory or --num-blocks, or a smaller --block-size."
        )
    if plan.total_bytes > free_bytes:
        raise KVCacheTooLarge(
            f"A KV cache of {num_blocks} blocks needs {_bytes(plan.total_bytes)}, but {device} has "
            f"{_bytes(free_bytes)} free: at most {free_bytes // bytes_per_block} blocks fit "
            f"(--num-blocks {free_bytes // bytes_per_block}, or --kv-cache-memory {free_bytes})."
        )
    return plan


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
        except (RuntimeError, MemoryError) as error:  # torch's out-of-memory error on every device, and numpy's
            raise KVCacheTooLarge(
                f"{device} could not allocate {_bytes(plan.total_bytes)} for the KV cache: {error}. "
                "Give a smaller --kv-cache-memory or --num-blocks."
            ) from error

    def fill(self, value: float) -> None:
        """Overwrite every slot outside the null block: what no sequence has written may be anything. For tests."""
        for layer in self.layers:
            layer.k_cache[1:].fill_(value)
            layer.v_cache[1:].fill_(value)


def _zeros_on_demand(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take memory only where they are touched. torch.zeros writes them all, which takes seconds for a few GiB, and a
    laptop's memory for blocks that nobody uses yet."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)  # calloc: pages of the kernel's own zeros
    begin = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[begin : begin + num_bytes]).view(dtype).view(shape)


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
