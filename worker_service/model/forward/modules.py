"""Forward passes by transformers' modules, whose attention is paged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...attention.backend import AttentionBackend
from ...attention.layer import KVLayer
from ...attention.packing import Packing
from .forward import Forward, Runtime, Selected
from .kv_cache import KVCache
from .layers import AttentionLayer, bind_layers, unbind_layers
from .packed_linear import PackedLinear
from .row_selector import RowSelector


@dataclass(frozen=True, slots=True, eq=False)
class ModulesRuntime:
    """The Runtime of a transformers model."""

    model: Any
    layers: Sequence[AttentionLayer]
    device: torch.device

    @property
    def config(self) -> Any:
        return self.model.config

    def bind(self, cache: KVCache, backend: AttentionBackend | None) -> Forward:
        assert backend is not None
        return ModulesForward(self.model, self.layers, cache.layers, backend, self.device)

    def num_bytes(self) -> int:
        return tensor_bytes(self.model)


class ModulesForward:
    """The Forward of a transformers model."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[AttentionLayer],
        kv_layers: Sequence[KVLayer],
        backend: AttentionBackend,
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._backend = backend
        self._device = device
        self._selector = RowSelector(model)
        bind_layers(layers, kv_layers, backend)

    def run(self, packing: Packing, rows: Sequence[int]) -> Selected:
        self._backend.begin(packing)
        return self._selector.run(
            torch.tensor(rows, dtype=torch.int64, device=self._device),
            input_ids=packing.input_ids,
            position_ids=packing.position_ids,
            use_cache=False,
        )

    def close(self) -> None:
        self._selector.close()
        unbind_layers(self._layers)


def modules_of(runtime: Runtime) -> Any:
    """The transformers model of a runtime that has one."""
    assert isinstance(runtime, ModulesRuntime)
    return runtime.model


def tensor_bytes(model: torch.nn.Module) -> int:
    """Size of a model's parameters, buffers and packed weights, each tensor counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [module.weight for module in model.modules() if isinstance(module, PackedLinear)]
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(tensor): tensor for tensor in tensors}.values())
