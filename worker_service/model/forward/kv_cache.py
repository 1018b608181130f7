"""The tensors of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...attention.layer import KVLayer
from ...pages import zero_pages
from ..errors import KVCacheTooLarge
from .kv_groups import sights
from .kv_plan import KVCachePlan, show_bytes
from .layers import AttentionLayer
from .mixer import Mixer
from .state_tensors import StateTensors


class KVCache:
    """The KV tensors of all layers, and the states of all mixers, allocated once and zero, each with the blocks of its group."""

    def __init__(
        self,
        plan: KVCachePlan,
        layers: Sequence[AttentionLayer],
        dtype: torch.dtype,
        device: torch.device,
        mixers: Sequence[Mixer] = (),
    ) -> None:
        self.plan = plan
        zeros = _zeros_on_demand if device.type == "cpu" else torch.zeros
        self.layers: list[KVLayer] = []
        """In the order of the layers; one that reads the KV of another one has the tensors of that one."""
        try:
            for layer, window in zip(layers, sights(layers), strict=True):
                if layer.source is not None:
                    self.layers.append(replace(self.layers[layer.source], window=layer.window, is_reader=True))
                    continue
                group = plan.groups[plan.group_of(window)]
                shape = (group.num_blocks, plan.block_size, layer.num_kv_heads)
                k_cache = zeros(*shape, layer.k_head_dim, dtype=dtype, device=device)
                v_cache = zeros(*shape, layer.v_head_dim, dtype=dtype, device=device)
                self.layers.append(KVLayer(group.index, layer.window, k_cache, v_cache))
            self.states = None if plan.states is None else StateTensors(mixers, plan.states.num_blocks, device, zeros)
            """Of recurrent layers."""
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
        if self.states is not None:
            self.states.fill(value)


def _zeros_on_demand(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return zero_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
