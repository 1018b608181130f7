"""The tensors of the KV cache, and of the states of recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ...attention.layer import KVLayer
from ...huge_pages import zero_pages
from ...step import BlockCopy
from ..errors import KVCacheTooLarge
from .kv_plan import KVCachePlan, show_bytes
from .layers import AttentionLayer, sights
from .mixer import Mixer


class StateTensors:
    """The states of a model's mixers, allocated once and zero. Block 0 is the null block: it is neither read nor written."""

    def __init__(
        self, mixers: Sequence[Mixer], num_blocks: int, device: torch.device, zeros: Callable[..., torch.Tensor]
    ) -> None:
        """zeros: allocates as torch.zeros does."""
        self.of_mixers = [
            [zeros(num_blocks, *spec.shape, dtype=spec.dtype, device=device) for spec in mixer.states]
            for mixer in mixers
        ]
        """One tensor [num_blocks, …] for each state of each mixer."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (tensor for tensors in self.of_mixers for tensor in tensors)

    def fill(self, value: float) -> None:
        """Overwrite every block but the null block. For the self-check and tests."""
        for tensor in self:
            tensor[1:].fill_(value)

    def are_finite(self, blocks: torch.Tensor) -> torch.Tensor:
        """bool [N]: whether all numbers of each of the blocks [N] are finite."""
        finite = torch.ones(len(blocks), dtype=torch.bool, device=blocks.device)
        for tensor in self:
            finite &= tensor.index_select(0, blocks).flatten(1).isfinite().all(-1)
        return finite


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
        self._device = device
        zeros = _zeros_on_demand if device.type == "cpu" else torch.zeros
        self.layers: list[KVLayer] = []
        """One entry for each layer, in order; a layer that reads the KV of another one has that one's tensors."""
        try:
            for layer, window in zip(layers, sights(layers), strict=True):
                if layer.source is not None:
                    self.layers.append(replace(self.layers[layer.source], window=layer.needs.window, is_reader=True))
                    continue
                if layer.needs.is_cross:
                    assert plan.cross is not None, (
                        "the plan of a model that attends to an encoder's output has a cross group"
                    )
                    index, num_blocks = plan.cross_index, plan.cross.num_blocks
                else:
                    index = plan.group_of(window)
                    num_blocks = plan.groups[index].num_blocks
                shape = (num_blocks, plan.block_size, layer.needs.num_kv_heads)
                k_cache = zeros(*shape, layer.needs.k_head_dim, dtype=dtype, device=device)
                v_cache = zeros(*shape, layer.needs.v_head_dim, dtype=dtype, device=device)
                self.layers.append(
                    KVLayer(
                        index,
                        layer.needs.window,
                        k_cache,
                        v_cache,
                        is_cross=layer.needs.is_cross,
                        distance_bias=layer.distance_bias,
                    )
                )
            self.states = None if plan.states is None else StateTensors(mixers, plan.states.num_blocks, device, zeros)
            """States of the recurrent layers; None: the model has none."""
        except (RuntimeError, OSError) as error:  # out of memory: torch's errors, and the kernel's
            raise KVCacheTooLarge(
                f"{device} could not allocate {show_bytes(plan.total_bytes)} for the KV cache: {error}. "
                "Give a smaller --kv-cache-memory or --num-blocks."
            ) from error

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks as a whole, one copy after the other, so that a copy may be copied. The layout within a block does not
        matter, so this holds for every runtime."""
        for run in _independent(copies):
            for group in {copy.group for copy in run}:
                chosen = [copy for copy in run if copy.group == group]
                sources, targets = (
                    torch.tensor(blocks, device=self._device)
                    for blocks in ([copy.source for copy in chosen], [copy.target for copy in chosen])
                )
                for tensor in self._tensors_of(group):
                    tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def _tensors_of(self, group: int) -> Iterator[torch.Tensor]:
        """All that is kept in the blocks of a group."""
        for layer in self.layers:
            if layer.group == group and not layer.is_reader:
                yield layer.k_cache
                yield layer.v_cache
        if self.states is not None and group == len(self.plan.groups):  # that of states comes after the others
            yield from self.states

    def fill(self, value: float) -> None:
        """Overwrite every slot outside the null block: unwritten slots may have any value. For the self-check and tests."""
        for layer in self.layers:
            layer.k_cache[1:].fill_(value)
            layer.v_cache[1:].fill_(value)
        if self.states is not None:
            self.states.fill(value)


def _independent(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """The copies in order, in runs of which none reads what another one writes."""
    run: list[BlockCopy] = []
    written: set[tuple[int, int]] = set()
    for copy in copies:
        if (copy.group, copy.source) in written:
            yield run
            run, written = [], set()
        run.append(copy)
        written.add((copy.group, copy.target))
    if run:
        yield run


def _zeros_on_demand(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return zero_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
