"""The KV of an attention layer, the types of attention calls, and the interface of backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from .packing import Packing


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


AttentionTarget = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, AttentionCall], torch.Tensor]
"""The target of a bound attention module: the paged layer in service, a recorder while loading. It gets the module, and after RoPE
query [1, Hq, ΣT, Dk], key [1, Hkv, ΣT, Dk] and value [1, Hkv, ΣT, Dv]; returns contiguous [1, ΣT, Hq, Dv]. Cross attention has keys
and values of any length."""


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


class AttentionBackend(Protocol):
    """Reads and writes the paged KV of all layers. One step at a time, from one thread.

    Slots that no token of the step's sequences has written may hold any value, NaN included: a backend must keep them out of the
    arithmetic, even with weight 0. Only block 0, the null block, may be read as padding: it is zero. In a group with a window,
    blocks wholly before the window of a part's first token may be gone: their entries in the tables are not to be read.
    """

    def begin(self, packing: Packing) -> None:
        """Build the metadata of the next step, used by every attend until the next begin."""

    def attend(
        self, layer: KVLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Write the new K and V to their slots, then attend causally over each sequence's blocks; in a cross layer write
        nothing, and attend to all of each sequence's encoder.

        query [1, Hq, ΣT, Dk], key [1, Hkv, ΣT, Dk], value [1, Hkv, ΣT, Dv]; returns contiguous [1, ΣT, Hq, Dv].
        """


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A model on a device."""

    needs: tuple[LayerNeeds, ...]
    """The distinct needs of its layers."""
    dtype: torch.dtype
    device: torch.device
    block_size: int
