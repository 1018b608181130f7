"""What a model does to its logits after the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .errors import NotNative


def find_finish(
    config: Any, before: torch.Tensor, after: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What a model does to its logits after the head: nothing (None), a factor, or a soft cap. Raises NotNative.

    before: outputs of the head; after: the model's logits, both [T, vocab_size] float32.
    """
    if torch.equal(before, after):
        return None
    for finish in _finishes(config.get_text_config(decoder=True)):
        if torch.allclose(finish(before), after, rtol=1e-2, atol=1e-3):
            return finish
    raise NotNative(
        "it changes its logits after the head in a way that is neither a factor nor a soft cap of its config"
    )


def _finishes(config: Any) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap:
        yield lambda logits: softcap * torch.tanh(logits / softcap)
    if divisor := getattr(config, "logits_scaling", None):
        yield lambda logits: logits / divisor
    if factor := getattr(config, "logit_scale", None):
        yield lambda logits: logits * factor
