"""Attention by kernels that read KV blocks in place, through block tables on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .layer import AttentionCall, AttentionSpec, KVLayer
from .packing import Packing

_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8
_DTYPES = frozenset({torch.float16, torch.bfloat16})


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


class PagedStep(NamedTuple):
    """A step in the kernels' format."""

    block_tables: torch.Tensor
    """[N, width] int32 of one group; 0 before the first block that a part reads, any value after its last token."""
    query_ends: torch.Tensor
    """[N + 1] int32: 0, then the cumulative number of tokens."""
    context_ends: torch.Tensor
    """[N + 1] int32: 0, then the cumulative number of keys."""
    context_lens: torch.Tensor
    """[N] int32: keys of each part, its new tokens included."""
    max_query_len: int
    max_context_len: int


PagedKernel = Callable[[torch.Tensor, KVLayer, PagedStep, AttentionCall], torch.Tensor]
"""Causal attention of packed queries over paged KV, which has that of the step; the last query of a part sees its last key. The
query is contiguous [ΣT, Hq, D], the result [ΣT, Hq, D]."""


class PagedAttention:
    """An AttentionBackend: writes the new KV, then calls a PagedKernel.

    A kernel with a window begins with the tile of keys that has the first key that a query of its tile of queries sees. This tile
    may begin before the window, in a block that is gone: its entry is 0, so the kernel reads the null block, and hides it.
    """

    def __init__(self, kernel: PagedKernel) -> None:
        self._kernel = kernel
        self._packing: Packing | None = None
        self._steps: list[PagedStep] = []
        """The step as each group has it; only the block tables differ."""

    def begin(self, packing: Packing) -> None:
        context_lens = packing.context_lens
        on_device = (packing.starts_there + packing.query_lens_there).to(torch.int32)
        width = -(-max(context_lens) // packing.block_size)
        self._packing = packing
        step = PagedStep(
            block_tables=packing.gather_tables(width),
            query_ends=_ends(packing.query_lens_there),
            context_ends=_ends(on_device),
            context_lens=on_device,
            max_query_len=max(packing.query_lens),
            max_context_len=max(context_lens),
        )
        others = range(1, len(packing.groups))
        self._steps = [step, *(step._replace(block_tables=packing.gather_tables(width, group)) for group in others)]

    def attend(
        self, layer: KVLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        assert self._packing is not None, "attend before begin"
        layer.write(self._packing.groups[layer.group].slot_mapping, key, value)
        step = self._steps[layer.group]
        return self._kernel(query[0].transpose(0, 1).contiguous(), layer, step, call)[None].contiguous()


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    """[N] → [N + 1] int32, the cumulative sums from 0."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
