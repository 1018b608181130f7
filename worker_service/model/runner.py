"""One forward pass of a transformers model over the paged KV."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from ..attention.backend import AttentionBackend
from ..attention.packing import Packing, pack
from ..engine.step import PartResult, SequencePart, Step
from .kv_cache import KVCache
from .layers import AttentionLayer, bind_layers, unbind_layers
from .sampler import Draw, sample


class ModelRunner:
    """Implements StepRunner over a loaded model and its KV cache. Blocking; one step at a time."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[AttentionLayer],
        kv_cache: KVCache,
        backend: AttentionBackend,
        device: torch.device,
    ) -> None:
        self._model = model
        self._layers = layers
        self._backend = backend
        self._device = device
        self._selector = RowSelector(model)
        self.kv_cache = kv_cache
        bind_layers(layers, kv_cache.layers, backend)

    def execute(self, step: Step) -> list[PartResult]:
        """Run the step and sample; see StepRunner. Raises PackingError, before anything is written, for a bad part."""
        results = [PartResult()] * len(step.parts)
        if not step.parts:
            return results
        packing = self._pack(step.parts)
        asked = [index for index, part in enumerate(step.parts) if part.sampling is not None]
        rows = [packing.offsets[index] + packing.query_lens[index] - 1 for index in asked]
        with torch.inference_mode():
            logits = self._forward(packing, rows)
            if asked:
                tokens = sample(logits, [_draw(step.parts[index]) for index in asked])
                for index, token in zip(asked, tokens, strict=True):
                    results[index] = PartResult(token)
        return results

    def logits(self, parts: Sequence[SequencePart]) -> torch.Tensor:
        """Run the parts and return the logits of every new token, [ΣT, vocab_size]."""
        packing = self._pack(parts)
        with torch.inference_mode():
            return self._forward(packing, list(range(packing.num_tokens)))

    def close(self) -> None:
        """Let go of the KV tensors; the runner must not be used again."""
        unbind_layers(self._layers)

    def _pack(self, parts: Sequence[SequencePart]) -> Packing:
        plan = self.kv_cache.plan
        return pack(parts, plan.block_size, plan.num_blocks, self._device)

    def _forward(self, packing: Packing, rows: list[int]) -> torch.Tensor:
        """Logits of the given packed rows, [len(rows), vocab_size]."""
        self._backend.begin(packing)
        output = self._selector.run(
            torch.tensor(rows, dtype=torch.int64, device=self._device),
            input_ids=packing.input_ids,
            position_ids=packing.position_ids,
            use_cache=False,
        )
        logits: torch.Tensor = output.logits[0]
        assert logits.shape[0] == len(rows), f"{len(rows)} rows wanted, logits {tuple(logits.shape)}"
        return logits


class RowSelector:
    """Runs the model so that the output head sees only the rows whose logits are wanted."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rows: torch.Tensor | None = None
        self._by_argument = "logits_to_keep" in inspect.signature(model.forward).parameters
        if not self._by_argument:
            # Some models lack the argument; their head still is one module that gets [1, ΣT, hidden_size].
            model.get_output_embeddings().register_forward_pre_hook(self._select)

    def run(self, rows: torch.Tensor, **inputs: Any) -> Any:
        """The model's output for the inputs, logits [1, len(rows), vocab_size]."""
        if self._by_argument:
            return self._model(**inputs, logits_to_keep=rows)
        self._rows = rows
        try:
            return self._model(**inputs)
        finally:
            self._rows = None

    def _select(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        # None: somebody else runs the model, e.g. the guard in eager attention.
        return inputs if self._rows is None else (inputs[0][:, self._rows], *inputs[1:])


def _draw(part: SequencePart) -> Draw:
    assert part.sampling is not None
    return Draw(part.sampling, part.start + len(part.token_ids))
