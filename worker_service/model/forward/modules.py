"""Forward passes by transformers' modules, whose attention is paged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...attention.backend import AttentionBackend
from ...attention.packing import Packing
from ...engine.step import StateBlocks
from .contract import Forward, Runtime, Selected
from .kv_cache import KVCache
from .layers import AttentionLayer, bind_layers, unbind_layers
from .mixer import Mixer
from .mixer_binding import MixerBinding, lay_out
from .packed_linear import PackedLinear
from .row_selector import RowSelector


@dataclass(frozen=True, slots=True, eq=False)
class ModulesRuntime:
    """The Runtime of a transformers model."""

    model: Any
    layers: Sequence[AttentionLayer]
    device: torch.device
    mixers: Sequence[Mixer] = ()

    @property
    def config(self) -> Any:
        return self.model.config

    def bind(self, cache: KVCache, backend: AttentionBackend | None) -> Forward:
        assert backend is not None
        return ModulesForward(self, cache, backend)

    def num_bytes(self) -> int:
        return tensor_bytes(self.model)


class ModulesForward:
    """The Forward of a transformers model."""

    def __init__(self, runtime: ModulesRuntime, cache: KVCache, backend: AttentionBackend) -> None:
        self._layers = runtime.layers
        self._backend = backend
        self._device = runtime.device
        self._selector = RowSelector(runtime.model)
        bind_layers(runtime.layers, cache.layers, backend)
        self._states = cache.states
        self._mixers = MixerBinding(runtime.mixers, cache.states)

    def run(self, packing: Packing, rows: Sequence[int], states: Sequence[StateBlocks] = ()) -> Selected:
        self._backend.begin(packing)
        step = None
        if self._states is not None:
            step = lay_out(packing.offsets, packing.query_lens, states, self._device)
            self._mixers.begin(step)
        selected = self._selector.run(
            torch.tensor(rows, dtype=torch.int64, device=self._device),
            input_ids=packing.input_ids,
            position_ids=packing.position_ids,
            use_cache=False,
        )
        if self._states is not None and step is not None and step.snapshots is not None:
            # Others would go on from it. A running state that is not finite shows in the outputs of the sequence's next tokens.
            rows_of_snapshots, blocks = step.snapshots.last_rows, step.snapshots.blocks
            selected.is_finite[rows_of_snapshots] &= self._states.are_finite(blocks)
        return selected

    def encode(self, token_ids: Sequence[int], slots: torch.Tensor) -> None:
        raise AssertionError("the model has no encoder")

    def close(self) -> None:
        self._selector.close()
        self._mixers.release()
        unbind_layers(self._layers)


def modules_of(runtime: Runtime) -> Any:
    """The transformers model of a runtime that has one."""
    model = getattr(runtime, "model", None)
    assert model is not None, f"{type(runtime).__name__} has none"
    return model


def tensor_bytes(model: torch.nn.Module) -> int:
    """Size of a model's parameters, buffers and packed weights, each tensor counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [module.weight for module in model.modules() if isinstance(module, PackedLinear)]
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(tensor): tensor for tensor in tensors}.values())
