"""The last check before a model is served: paged attention must compute what eager attention does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from ..attention.interface import ATTENTION_NAME
from ..attention.torch_backend import TorchAttention
from ..engine.step import SequencePart
from .errors import UnsupportedModel
from .kv_cache import KVCache
from .layers import AttentionLayer
from .memory import KVCachePlan
from .runner import ModelRunner

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest relative difference of the logits (root mean square, of what varies between tokens)."""
_BLOCK_SIZE = 4
_LENGTHS = (21, 14)
# Steps of (sequence, first token, end): chunked, packed, the order changed, and prefill beside decode.
_STEPS = (
    ((1, 0, 5), (0, 0, 9)),
    ((0, 9, 16), (1, 5, 13)),
    ((1, 13, 14), (0, 16, 20)),
    ((0, 20, 21),),
)


def probe(
    model: Any, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device, max_model_len: int
) -> None:
    """Compare two random sequences, packed and in chunks over scattered blocks, with each alone in eager attention.

    Raises UnsupportedModel if they differ by more than rounding. The model is bound to nothing afterwards.
    """
    lengths = [min(length, max_model_len) for length in _LENGTHS]
    sequences = _random_sequences(model.config.get_text_config(decoder=True).vocab_size, lengths)
    paged = _paged_logits(model, layers, dtype, device, sequences)
    eager = _eager_logits(model, device, sequences)
    for ours, reference in zip(paged, eager, strict=True):
        difference = relative_difference(ours, reference)
        if not difference <= _TOLERANCE[dtype]:
            raise UnsupportedModel(
                f"{type(model).__name__} computes something else over paged KV than alone in eager attention: its logits "
                f"differ by {difference:.1%}, rounding in {dtype} explains {_TOLERANCE[dtype]:.1%}. It probably "
                "ignores position_ids or masks in a way of its own, and cannot be served."
            )


def relative_difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Root mean square of the difference over that of what varies in the reference, both [T, vocab_size]."""
    ours, reference = ours.double(), reference.double()
    varies = reference - reference.mean(dim=-1, keepdim=True)
    return float((ours - reference).norm() / varies.norm())


def _random_sequences(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _paged_logits(
    model: Any,
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    device: torch.device,
    sequences: list[list[int]],
) -> list[torch.Tensor]:
    per_sequence = -(-max(_LENGTHS) // _BLOCK_SIZE)
    plan = KVCachePlan(num_blocks=1 + 2 * per_sequence, block_size=_BLOCK_SIZE, bytes_per_token=0)
    runner = ModelRunner(model, layers, KVCache(plan, layers, dtype, device), TorchAttention(dtype), device)
    runner.kv_cache.fill(float("nan"))
    tables = [list(range(2 * per_sequence - 1, 0, -2)), list(range(2, 2 * per_sequence + 1, 2))]
    logits: list[list[torch.Tensor]] = [[], []]
    try:
        for step in _STEPS:
            chunks = [(index, first, sequences[index][first:end]) for index, first, end in step]
            chunks = [chunk for chunk in chunks if chunk[2]]
            if not chunks:
                continue
            parts = [SequencePart(tokens, first, tables[index], None) for index, first, tokens in chunks]
            rows = torch.split(runner.logits(parts), [len(tokens) for _, _, tokens in chunks])
            for (index, _, _), part_rows in zip(chunks, rows, strict=True):
                logits[index].append(part_rows)
    finally:
        runner.close()
    return [torch.cat(parts) for parts in logits]


def _eager_logits(model: Any, device: torch.device, sequences: list[list[int]]) -> list[torch.Tensor]:
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            return [model(torch.tensor([tokens], device=device), use_cache=False).logits[0] for tokens in sequences]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
