"""Attention by kernels that read KV blocks in place, through block tables on the device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from .layer import AttentionCall, KVLayer
from .packing import Packing


class PagedStep(NamedTuple):
    """A step in the kernels' format."""

    block_tables: torch.Tensor
    """[N, width] int32; entries after a part's last token may have any value."""
    query_ends: torch.Tensor
    """[N + 1] int32: 0, then the cumulative number of tokens."""
    context_ends: torch.Tensor
    """[N + 1] int32: 0, then the cumulative number of keys."""
    context_lens: torch.Tensor
    """[N] int32: keys of each part, its new tokens included."""
    max_query_len: int
    max_context_len: int


class PagedKernel(Protocol):
    """Causal attention of packed queries over paged KV; the last query of a part sees its last key."""

    def __call__(self, query: torch.Tensor, layer: KVLayer, step: PagedStep, call: AttentionCall) -> torch.Tensor:
        """query contiguous [ΣT, Hq, D] → [ΣT, Hq, D]. The step's KV is already written."""
        ...


class PagedAttention:
    """An AttentionBackend: writes the new KV, then calls a PagedKernel."""

    def __init__(self, kernel: PagedKernel) -> None:
        self._kernel = kernel
        self._slot_mapping: torch.Tensor | None = None
        self._step: PagedStep | None = None

    def begin(self, packing: Packing) -> None:
        parts, context_lens = packing.on_device, packing.context_lens
        on_device = (parts.starts + parts.query_lens).to(torch.int32)
        width = -(-max(context_lens) // packing.block_size)
        self._slot_mapping = packing.slot_mapping
        self._step = PagedStep(
            block_tables=parts.gather_tables(width),
            query_ends=_ends(parts.query_lens),
            context_ends=_ends(on_device),
            context_lens=on_device,
            max_query_len=max(packing.query_lens),
            max_context_len=max(context_lens),
        )

    def attend(
        self,
        layer: KVLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        assert self._step is not None, "attend before begin"
        assert self._slot_mapping is not None, "attend before begin"
        layer.write(self._slot_mapping, key, value)
        return self._kernel(query[0].transpose(0, 1).contiguous(), layer, self._step, call)[None].contiguous()


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    """[N] → [N + 1] int32, the cumulative sums from 0."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
