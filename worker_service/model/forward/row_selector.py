"""Selects the rows of the hidden states that need logits, before the output head."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedModel
from .contract import Selected


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
