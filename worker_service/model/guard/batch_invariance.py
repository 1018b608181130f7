"""Whether the logits of a loaded model depend on what else is in the step, found by trying its parts and the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...attention.backend import AttentionBackend
from ...attention.invariance import Finding
from ...attention.selection import find_invariance
from ...attention.torch_backend import TorchAttention
from ...engine.step import SequencePart
from ..facts import BatchInvariance
from ..forward.kv_cache import KVCache
from ..forward.kv_plan import KVCachePlan
from ..forward.layers import AttentionLayer
from ..forward.packed_linear import find_variance, packing_works
from ..forward.runner import ModelRunner
from ..placement import dtype_name
from .self_check import random_sequences

_BLOCK_SIZE = 16
_TEXT, _NEIGHBOUR = 0, 1
_LENGTHS = (18, 5)
"""Tokens of the text and of its neighbour. Every forward pass of a large model costs."""
_STEPS = (
    ((_TEXT, 0, 1),),
    ((_NEIGHBOUR, 0, 4), (_TEXT, 1, 7)),
    ((_TEXT, 7, 17), (_NEIGHBOUR, 4, 5)),
    ((_TEXT, 17, 18),),
)
"""Of (sequence, first token, end): alone, behind others, before others, and as the last row of a prefill."""


def find_batch_invariance(
    model: Any,
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    backend: AttentionBackend,
) -> BatchInvariance:
    """Try attention, the packed linear layers, and the logits of the whole model. The model is bound to nothing afterwards."""
    needs = tuple(dict.fromkeys(layer.needs for layer in layers))
    finding = find_invariance(dtype, device, needs)
    if finding is None or not isinstance(backend, TorchAttention):
        reason = f"{dtype_name(dtype)} on {device} takes the fastest kernels; it is tried for --dtype float32 on a CPU"
        return BatchInvariance(False, 0, reason)
    partition = backend.shapes.partition or 0
    problem = _problem(model, layers, device, max_model_len, backend, finding)
    if problem is None:
        reason = f"attention has {finding.how}; it, the linear layers and the whole model were tried at load"
        return BatchInvariance(True, partition, reason)
    consequence = "where two tokens are nearly as likely, the same request may get another text, with a seed too"
    return BatchInvariance(False, partition, f"{problem}; {consequence}")


def _problem(
    model: Any,
    layers: Sequence[AttentionLayer],
    device: torch.device,
    max_model_len: int,
    backend: TorchAttention,
    finding: Finding,
) -> str | None:
    """Why the last bits of a row depend on other rows; None if no such thing was found."""
    if not packing_works(torch.float32):
        return "torch has no oneDNN products for float32 here; needed: a torch that is built with oneDNN (MKLDNN)"
    if (where := find_variance(model)) is not None:
        return f"oneDNN's products depend on the rows beside: {where}"
    if not finding.holds:
        return f"attention is {finding.describe()}"
    num_different = _different_rows(model, layers, device, max_model_len, backend)
    if num_different:
        return f"{num_different} of {_LENGTHS[_TEXT]} rows of logits have other bits in chunks beside others than at once and alone"
    return None


def _different_rows(
    model: Any, layers: Sequence[AttentionLayer], device: torch.device, max_model_len: int, backend: AttentionBackend
) -> int:
    """Rows of the whole model's logits whose bits depend on how a text is cut into steps and what is beside it."""
    lengths = [min(length, max_model_len) for length in _LENGTHS]
    sequences = random_sequences(model.config, lengths)
    per_sequence = -(-max(lengths) // _BLOCK_SIZE)
    plan = KVCachePlan(num_blocks=1 + 2 * per_sequence, block_size=_BLOCK_SIZE, bytes_per_token=0)
    cache = KVCache(plan, layers, torch.float32, device)
    tables = [list(range(1 + index, plan.num_blocks, 2)) for index in range(2)]
    runner = ModelRunner(model, layers, cache, backend, device)
    try:
        at_once = runner.logits([SequencePart(sequences[_TEXT], 0, tables[_TEXT], None)])
        num_different = 0
        for step in _STEPS:
            chunks = [(index, first, sequences[index][first:end]) for index, first, end in step]
            chunks = [chunk for chunk in chunks if chunk[2]]
            if not chunks:
                continue
            logits = runner.logits(
                [SequencePart(tokens, first, tables[index], None) for index, first, tokens in chunks]
            )
            for (index, first, tokens), rows in zip(
                chunks, torch.split(logits, [len(tokens) for _, _, tokens in chunks]), strict=True
            ):
                if index == _TEXT:
                    num_different += int((rows != at_once[first : first + len(tokens)]).any(-1).sum())
    finally:
        runner.close()
    return num_different
