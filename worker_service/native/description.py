"""What a native step needs to know of a model: sizes, norms, and where the weights are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch


class Activation(IntEnum):
    """The activation of the MLP. The numbers are those of cpu/csrc/step.h."""

    silu = 0
    gelu_tanh = 1
    gelu = 2
    relu = 3
    relu_squared = 4


class Rows(NamedTuple):
    """Outputs of a linear module: rows of its weight [outputs, inputs]."""

    module: torch.nn.Module
    outputs: slice | torch.Tensor
    """Which ones: int64 indices if they are not next to each other."""
    num_outputs: int
    is_transposed: bool = False
    """The weight is [inputs, outputs]."""

    def weight(self) -> torch.Tensor:
        """[num_outputs, inputs], contiguous."""
        weight: torch.Tensor = self.module.weight.detach()  # type: ignore[operator]
        if self.is_transposed:
            weight = weight.t()
        return weight[self.outputs].contiguous()

    def bias(self) -> torch.Tensor | None:
        """[num_outputs] in float32."""
        bias: torch.Tensor | None = getattr(self.module, "bias", None)
        return None if bias is None else bias.detach()[self.outputs].float().contiguous()


class NormDescription(NamedTuple):
    """RMSNorm, or LayerNorm if it is centered."""

    weight: torch.Tensor | None
    """[n] float32, the factor itself. Of heads [head size], or [heads, head size]."""
    bias: torch.Tensor | None
    epsilon: float
    is_centered: bool


class HeadNorms(NamedTuple):
    """Norms of Q and K."""

    query: NormDescription | None = None
    key: NormDescription | None = None
    are_whole: bool = False
    """Over all heads together; else over each."""
    follow_rotation: bool = False


class RotaryDescription(NamedTuple):
    """Rotation of the leading `size` numbers of every head."""

    cos: torch.Tensor
    """[positions, size / 2] float32."""
    sin: torch.Tensor
    size: int
    is_interleaved: bool
    """Pairs (2i, 2i + 1); else (i, i + size / 2)."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionDescription:
    num_heads: int
    num_kv_heads: int
    head_size: int
    scaling: float
    window: int | None
    softcap: float | None
    query: Rows
    key: Rows
    value: Rows
    out: Rows
    rotary: RotaryDescription | None
    norms: HeadNorms


class MLPDescription(NamedTuple):
    """down(activation(gate) · up), or down(activation(up))."""

    gate: Rows | None
    """None: the MLP is not gated."""
    up: Rows
    down: Rows
    activation: Activation


@dataclass(frozen=True, slots=True, eq=False)
class LayerDescription:
    """One layer: attention and the MLP, each added to the residual."""

    attention: AttentionDescription
    mlp: MLPDescription
    before_attention: NormDescription | None = None
    after_attention: NormDescription | None = None
    before_mlp: NormDescription | None = None
    after_mlp: NormDescription | None = None
    is_parallel: bool = False
    """The MLP gets the same residual as attention; else one with attention added."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelDescription:
    """A model whose layers all have this form. Weights are in `dtype`, float32 or bfloat16."""

    dtype: torch.dtype
    hidden_size: int
    vocab_size: int
    embedding: torch.nn.Module
    head: Rows
    """Its weight may be the embedding's."""
    last_norm: NormDescription | None
    layers: Sequence[LayerDescription]
    embedding_norm: NormDescription | None = None
    """After the positions are added."""
    positions: torch.Tensor | None = None
    """[positions, hidden_size] learned, added to the embedding."""
    position_offset: int = 0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """The factor by which attention's and the MLP's outputs are multiplied before they are added to the residual."""

    @property
    def is_tied(self) -> bool:
        return self.head.module.weight is self.embedding.weight
