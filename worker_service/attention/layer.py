"""The KV of an attention layer, and the types of attention calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class AttentionCall(NamedTuple):
    """Arguments of one attention call besides q, k and v."""

    scaling: float
    """Factor on q·k."""
    window: int | None = None
    """A token sees itself and the window − 1 tokens before it; None: all before it."""
    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap) before the mask."""
    sinks: torch.Tensor | None = None
    """[num_heads] logits that take part in the softmax and have no value (gpt-oss)."""
    bias: torch.Tensor | None = None
    """[1, num_heads, T, S] added to the scores, as the module computed it from the places of the row (T5). It shows that there is a
    bias; the one of our positions is in KVLayer.distance_bias."""


class LayerNeeds(NamedTuple):
    """Shapes and options of a layer's attention, the same in every step."""

    num_heads: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    scaling: float = 1.0
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    is_cross: bool = False
    """Whether it attends to the output of an encoder."""
    has_bias: bool = False
    """Whether its scores have a bias by distance."""


class AttentionTarget(Protocol):
    """The target of a bound attention module: the paged layer in service, a recorder while loading."""

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """query [1, Hq, ΣT, Dk], key [1, Hkv, ΣT, Dk], value [1, Hkv, ΣT, Dv] after RoPE → contiguous [1, ΣT, Hq, Dv]. Cross
        attention has keys and values of any length."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KVLayer:
    """The KV of one layer. The tensors are allocated once; block 0 is the null block and stays zero."""

    group: int
    """Index of its group: layers of one group share block tables."""
    window: int | None
    """Sliding window in tokens, as in AttentionCall."""
    k_cache: torch.Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim of K]."""
    v_cache: torch.Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim of V]."""
    is_reader: bool = False
    """The KV is that of an earlier layer, which has written it: nothing is written again."""
    is_cross: bool = False
    """The KV is that of the encoder's outputs, which are in its blocks before the step: a row sees all of its own one."""
    distance_bias: torch.Tensor | None = None
    """[num_heads, max_model_len] added to the scores: entry d for a key d positions before the query. None: no bias."""

    @property
    def block_size(self) -> int:
        return int(self.k_cache.shape[1])

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V by slot: views [num_blocks · block_size, num_kv_heads, head_dim]."""
        return self.k_cache.view(-1, *self.k_cache.shape[2:]), self.v_cache.view(-1, *self.v_cache.shape[2:])

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put key and value [1, Hkv, ΣT, D] into their slots [ΣT] of the layer's group."""
        if self.is_reader:
            return
        k_rows, v_rows = self.rows()
        k_rows.index_copy_(0, slots, key[0].transpose(0, 1))
        v_rows.index_copy_(0, slots, value[0].transpose(0, 1))
