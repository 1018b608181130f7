"""The check of a packed model: the native step must compute what transformers computed with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...step import SequencePart
from ..errors import NotNative
from ..forward.contract import Runtime
from ..guard.self_check import eager_logits, logits_of_texts, paged_runner, random_sequences, relative_difference


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


_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.2}
"""Largest relative difference of the logits (root mean square, of what varies between tokens). SmolLM2's is 1e-5 in float32.
In bfloat16 transformers' own rounding is a tenth, three times that of the native step. So what a model computes is checked with
a replica in float32, and here only that its weights are where they belong."""
QUANTIZED_TOLERANCE = 0.6
"""With weights of int8: SmolLM2's random tokens differ by 0.2 to 0.4, its texts by a tenth."""
_LENGTHS = (40, 24, 9)
_BLOCK_SIZE = 16
# Steps of (sequence, first token, end): at once, in chunks with others, and decodes.
_STEPS = (
    ((0, 0, 17),),
    ((1, 0, 24), (0, 17, 39)),
    ((0, 39, 40), (2, 0, 8)),
    ((2, 8, 9),),
)


class Reference:
    """Logits of transformers for random sequences, taken before the weights are packed."""

    def __init__(self, model: Any, device: torch.device, max_model_len: int) -> None:
        self.sequences = random_sequences(model.config, [min(length, max_model_len) for length in _LENGTHS])
        outputs: list[torch.Tensor] = []
        hook = model.get_output_embeddings().register_forward_hook(lambda _, __, output: outputs.append(output))
        try:
            self.logits = [eager_logits(model, tokens, device).float() for tokens in self.sequences]
        finally:
            hook.remove()
        self.finish = find_finish(model.config, outputs[-1][0].float(), self.logits[-1])
        """The function that turns the head's outputs into logits, for NativeRuntime; None: they are the logits."""


def check(runtime: Runtime, reference: Reference, tolerance: float | None = None) -> None:
    """Raises NotNative if a sequence differs by more than the tolerance (None: by more than rounding), or reads slots that no token
    has written."""
    with paged_runner(runtime, None, len(reference.sequences), max(_LENGTHS), _BLOCK_SIZE) as (runner, tables):
        rows, tokens = logits_of_texts(runner, reference.sequences, tables, _STEPS), reference.sequences[0]
        again = runner.logits([SequencePart(tokens[-1:], len(tokens) - 1, (tables[0],), None)])
        if not torch.equal(again[0], rows[0][-1]):
            raise NotNative("a token's logits have other bits in another step")
    tolerance = tolerance or _TOLERANCE[runtime.dtype]
    for ours, wanted in zip(rows, reference.logits, strict=True):
        difference = relative_difference(ours.float(), wanted)
        if not difference <= tolerance:
            raise NotNative(
                f"its logits differ from those of transformers by {difference:.2%} of their deviation; rounding explains "
                f"{tolerance:.2%}"
            )
