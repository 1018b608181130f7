"""Forward passes by transformers' modules, whose attention is paged, for the rows that need logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...attention.interface import unbind
from ...attention.layer import AttentionBackend
from ...attention.packing import Packing
from ...step import StateBlocks
from ..errors import UnsupportedModel
from .contract import Forward, Runtime, Selected
from .kv_cache import KVCache
from .layers import bind_layers
from .mixer_binding import MixerBinding, lay_out
from .packed_linear import PackedLinear


class RowSelector:
    """Runs a language model so that its output head gets selected rows only, in every architecture.

    A hook selects before the module of get_output_embeddings(): not every model supports `logits_to_keep`, and operations after the
    head (scaling, soft caps) do not change. close() removes the hook.
    """

    def __init__(self, model: Any) -> None:
        """Raises UnsupportedModel if the model has no output head."""
        self._model = model
        self._rows: torch.Tensor | None = None
        self._is_finite: torch.Tensor | None = None
        self._num_calls = 0
        head = model.get_output_embeddings()
        if head is None:
            raise UnsupportedModel(
                f"{type(model).__name__} has no output embeddings, so it computes no logits of a token."
            )
        self._hook = head.register_forward_pre_hook(self._select)

    def run(self, rows: torch.Tensor, **inputs: Any) -> Selected:
        """Run the model over the inputs [1, T] for the logits of the given rows: int64, any of 0 … T − 1.

        Raises UnsupportedModel if the head is not called exactly once, with [1, T, hidden_size].
        """
        self._rows, self._num_calls = rows, 0
        try:
            output = self._model(**inputs)
        finally:
            is_finite, self._is_finite, self._rows = self._is_finite, None, None
        if is_finite is None or self._num_calls != 1 or output.logits.shape[:2] != (1, len(rows)):
            raise UnsupportedModel(
                f"{type(self._model).__name__} calls its output embeddings {self._num_calls} times in one forward pass and returns "
                f"logits {list(output.logits.shape)} for {len(rows)} rows; needed: one call, for these rows only."
            )
        return Selected(output.logits[0], is_finite)

    def close(self) -> None:
        self._hook.remove()

    def _select(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._rows is None:  # not called by `run`, e.g. by the guard in eager attention
            return None
        self._num_calls += 1
        if not inputs or inputs[0].dim() != 3 or inputs[0].shape[0] != 1:
            shapes = [list(value.shape) for value in inputs]
            raise UnsupportedModel(
                f"{type(self._model).__name__} calls its output embeddings with inputs of the shapes {shapes}; "
                "needed: [1, tokens, hidden_size]."
            )
        hidden_states = inputs[0]
        # The sum is finite if and only if all terms are: a model's numbers are far from the largest float32.
        self._is_finite = hidden_states[0].sum(-1, dtype=torch.float32).isfinite()
        return (hidden_states[:, self._rows], *inputs[1:])


@dataclass(frozen=True, slots=True, eq=False)
class ModulesRuntime(Runtime):
    """The Runtime of a transformers model."""

    model: Any

    def bind(self, cache: KVCache, backend: AttentionBackend | None) -> Forward:
        assert backend is not None
        return ModulesForward(self, cache, backend)

    def num_bytes(self) -> int:
        return tensor_bytes(self.model)


class ModulesForward(Forward):
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

    def close(self) -> None:
        self._selector.close()
        self._mixers.release()
        for layer in self._layers:
            unbind(layer.module)


def modules_of(runtime: Runtime) -> Any:
    """The transformers model of a runtime that has one."""
    assert isinstance(runtime, ModulesRuntime)
    return runtime.model


def tensor_bytes(model: torch.nn.Module) -> int:
    """Size of a model's parameters, buffers and packed weights, each tensor counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [module.weight for module in model.modules() if isinstance(module, PackedLinear)]
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(tensor): tensor for tensor in tensors}.values())
