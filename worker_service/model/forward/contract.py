"""The seam between a step and what computes it: transformers' modules, or the native step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...attention.layer import AttentionBackend, LayerNeeds
from ...attention.packing import Packing
from ...step import StateBlocks
from .kv_cache import KVCache
from .layers import AttentionLayer
from .mixer import Mixer


class Selected(NamedTuple):
    """The result of a forward pass."""

    logits: torch.Tensor
    """[rows selected, vocab_size]."""
    is_finite: torch.Tensor
    """bool [T]: for every token, selected or not, whether what is computed of it is finite: its KV in any case, and at least for
    selected tokens the hidden state before the head."""


class Forward(ABC):
    """A model bound to a KV cache."""

    @abstractmethod
    def run(self, packing: Packing, rows: Sequence[int], states: Sequence[StateBlocks] = ()) -> Selected:
        """Write the KV of the packed tokens and compute the logits of the given ones. Called in inference mode.

        states: where the states of each part are, if the model has recurrent layers; the states after the part are written, too.
        """

    def encode(self, token_ids: Sequence[int], slots: torch.Tensor) -> None:
        """Run the encoder over one input and write the KV of its output into the slots of the cross group, one for each token. Only
        encoder-decoder models have it. Called in inference mode."""
        raise AssertionError("the model has no encoder")

    @abstractmethod
    def close(self) -> None:
        """Release the KV tensors; it must not be used afterwards."""


@dataclass(frozen=True, slots=True, eq=False)
class Runtime(ABC):
    """A loaded model, and how its forward passes are computed."""

    config: Any
    """The model's config, of transformers."""
    layers: Sequence[AttentionLayer]
    """Its attention layers, in the order in which they run."""
    dtype: torch.dtype
    """Type of weights and KV."""
    device: torch.device
    mixers: Sequence[Mixer]
    """Its recurrent layers, in the order in which they run."""

    @property
    def attention_needs(self) -> tuple[LayerNeeds, ...]:
        """The distinct needs of its attention layers."""
        return tuple(dict.fromkeys(layer.needs for layer in self.layers))

    @abstractmethod
    def bind(self, cache: KVCache, backend: AttentionBackend | None) -> Forward:
        """Bind the model to a KV cache, one at a time. backend: None: the runtime attends itself."""

    @abstractmethod
    def num_bytes(self) -> int:
        """Size of its weights and buffers."""
