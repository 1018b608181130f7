"""The seam between a step and what computes it: transformers' modules, or the native step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ...attention.layer import AttentionBackend
from ...attention.packing import Packing
from ...engine.step import StateBlocks
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


class Forward:
    """A model bound to a KV cache."""

    def run(self, packing: Packing, rows: Sequence[int], states: Sequence[StateBlocks] = ()) -> Selected:
        """Write the KV of the packed tokens and compute the logits of the given ones. Called in inference mode.

        states: where the states of each part are, if the model has recurrent layers; the states after the part are written, too.
        """
        raise NotImplementedError

    def encode(self, token_ids: Sequence[int], slots: torch.Tensor) -> None:
        """Run the encoder over one input and write the KV of its output into the slots of the cross group, one for each token. Only
        encoder-decoder models have it. Called in inference mode."""
        raise AssertionError("the model has no encoder")

    def close(self) -> None:
        """Release the KV tensors; it must not be used afterwards."""
        raise NotImplementedError


class Runtime(Protocol):
    """A loaded model, and how its forward passes are computed."""

    @property
    def config(self) -> Any:
        """The model's config, of transformers."""
        ...

    @property
    def layers(self) -> Sequence[AttentionLayer]:
        """Its attention layers, in the order in which they run."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and KV."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def mixers(self) -> Sequence[Mixer]:
        """Its recurrent layers, in the order in which they run."""
        ...

    def bind(self, cache: KVCache, backend: AttentionBackend | None) -> Forward:
        """Bind the model to a KV cache, one at a time. backend: None: the runtime attends itself."""
        ...

    def num_bytes(self) -> int:
        """Size of its weights and buffers."""
        ...
