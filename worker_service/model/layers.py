"""The attention layers of a model, found by watching one forward pass, and what they are bound to in service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..attention.backend import AttentionBackend
from ..attention.interface import UnsupportedAttention, bind, unbind
from ..attention.layer import AttentionCall, KVLayer
from .errors import UnsupportedModel

_WATCHED_TOKENS = 3


class AttentionLayer(NamedTuple):
    """One attention module of the model, in the order of the forward pass."""

    name: str
    module: torch.nn.Module
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window: int | None
    """Sliding window in tokens; None: full attention."""


def find_attention_layers(model: Any, device: torch.device) -> list[AttentionLayer]:
    """All modules that reach our attention function in a forward pass, each exactly once; else UnsupportedModel."""
    names = {module: name for name, module in model.named_modules()}
    recorder = _Recorder(names)
    for module in names:
        bind(module, recorder)
    try:
        tokens = torch.arange(_WATCHED_TOKENS, device=device)[None]
        with torch.inference_mode():
            model(input_ids=tokens, position_ids=tokens, use_cache=False)
    except UnsupportedAttention as error:
        raise UnsupportedModel(f"{type(model).__name__} cannot be served: {error}.") from error
    finally:
        for module in names:
            unbind(module)
    return recorder.found


class _Recorder:
    """Stands in for attention: notes who calls, and answers with something of the right shape."""

    def __init__(self, names: dict[torch.nn.Module, str]) -> None:
        self._names = names
        self.found: list[AttentionLayer] = []

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        name = self._names[module]
        if any(layer.module is module for layer in self.found):
            raise UnsupportedAttention(f"its module {name} attends more than once in one forward pass")
        if query.shape[2] != _WATCHED_TOKENS or key.shape[2] != _WATCHED_TOKENS or query.shape[0] != 1:
            raise UnsupportedAttention(f"its module {name} does not attend from each token to each token of the row")
        self.found.append(AttentionLayer(name, module, key.shape[1], key.shape[3], value.shape[3], call.window))
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class PagedTarget:
    """What an attention module is bound to in service."""

    layer: KVLayer
    backend: AttentionBackend

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        if call.window != self.layer.window:
            raise UnsupportedAttention(f"window {call.window} differs from {self.layer.window} seen while loading")
        return self.backend.attend(self.layer, query, key, value, call)


def bind_layers(layers: Sequence[AttentionLayer], kv_layers: Sequence[KVLayer], backend: AttentionBackend) -> None:
    """Let every attention module read and write its KV through the backend; replaces earlier bindings."""
    for layer, kv_layer in zip(layers, kv_layers, strict=True):
        bind(layer.module, PagedTarget(kv_layer, backend))


def unbind_layers(layers: Sequence[AttentionLayer]) -> None:
    """Let go of the KV tensors; the model cannot run until it is bound again."""
    for layer in layers:
        unbind(layer.module)
