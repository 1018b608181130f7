"""Tests whether the logits of a loaded model depend on other parts of the step: layer by layer, and as a whole."""

from __future__ import annotations

import torch

from kvpool.v1.worker_pb2 import BatchInvariance

from ...attention.invariance import Finding
from ...attention.layer import AttentionBackend
from ...attention.selection import find_invariance
from ...attention.torch_backend import TorchAttention
from ...native.cpu.program import PARTITION
from ...step import EncoderBlocks
from ..forward.contract import Runtime
from ..forward.encoder_decoder import EncoderDecoderRuntime
from ..forward.modules import modules_of
from ..forward.native import NativeRuntime
from ..forward.packed_linear import find_variance, packing_works
from ..placement import dtype_name
from .self_check import logits_of_texts, paged_runner, random_sequences

_BLOCK_SIZE = 16
_TEXT, _NEIGHBOUR = 0, 1
_LENGTHS = (18, 5)
"""Tokens of the text and of its neighbour; short, because forward passes of a large model are slow."""
_ENCODER_LENGTHS = (7, 4)
"""Tokens of the encoder's input for each; less than a block."""
_STEPS = (
    ((_TEXT, 0, 1),),
    ((_NEIGHBOUR, 0, 3), (_TEXT, 1, 7)),
    ((_TEXT, 7, 16), (_NEIGHBOUR, 3, 4)),
    ((_TEXT, 16, 17), (_NEIGHBOUR, 4, 5)),
    ((_TEXT, 17, 18),),
)
"""Steps of (sequence, first token, end): alone, after others, before others, a decode with another one, and as the last row of a
prefill."""


def find_batch_invariance(runtime: Runtime, max_model_len: int, backend: AttentionBackend | None) -> BatchInvariance:
    """Test attention, the packed linear layers, and the logits of the whole model. The model is unbound afterwards."""
    if isinstance(runtime, NativeRuntime):
        reason = "every sum of the native step has one order; the whole model was tested at load"
        return _finding(PARTITION, _differences(runtime, max_model_len, backend), reason)
    finding = find_invariance(runtime.dtype, runtime.device, runtime.attention_needs)
    if finding is None or not isinstance(backend, TorchAttention):
        placed = f"{dtype_name(runtime.dtype)} on {runtime.device}"
        reason = f"{placed} uses the fastest kernels; it is tested for --dtype float32 on a CPU"
        return BatchInvariance(reason=reason)
    reason = f"attention has {finding.how}; it, the linear layers and the whole model were tested at load"
    return _finding(backend.shapes.partition or 0, _problem(runtime, max_model_len, backend, finding), reason)


def _finding(partition: int, problem: str | None, reason: str) -> BatchInvariance:
    """reason: what makes it so, unless there is a problem."""
    if problem is None:
        return BatchInvariance(promised=True, attention_partition=partition, reason=reason)
    consequence = "if two tokens are almost equally likely, the same request may get another text, even with a seed"
    return BatchInvariance(attention_partition=partition, reason=f"{problem}; {consequence}")


def _problem(runtime: Runtime, max_model_len: int, backend: TorchAttention, finding: Finding) -> str | None:
    """Why the last bits of a row depend on other rows, with torch; None if no such case was found."""
    if not packing_works(torch.float32):
        return "torch has no oneDNN products for float32 here; needed: a torch built with oneDNN (MKLDNN)"
    if (where := find_variance(modules_of(runtime))) is not None:
        return f"oneDNN's products depend on other rows: {where}"
    if not finding.holds:
        return f"attention is {finding.describe()}"
    differences = _differences(runtime, max_model_len, backend)
    if runtime.mixers:
        # Not promised either if this short text shows none: a convolution may take another way for longer chunks.
        seen = f" ({differences})" if differences else ""
        return f"recurrent layers sum in an order that depends on how a text is cut into chunks and single tokens{seen}"
    return differences


def _differences(runtime: Runtime, max_model_len: int, backend: AttentionBackend | None) -> str | None:
    """A line about rows of the text's logits whose bits depend on how it is cut into steps, or on the other text; None if there are
    none."""
    lengths = [min(length, max_model_len) for length in _LENGTHS]
    sequences = random_sequences(runtime.config, lengths)
    encoders = _encoders(runtime)
    with paged_runner(runtime, backend, len(lengths), max(lengths), _BLOCK_SIZE, encoders) as (runner, tables):
        whole = [[(_TEXT, 0, lengths[_TEXT])]]
        at_once = logits_of_texts(runner, sequences[:1], tables, whole, encoders)[_TEXT]
        in_steps = logits_of_texts(runner, sequences, tables, _STEPS, encoders)[_TEXT]
    num_different = int((in_steps != at_once).any(-1).sum())
    if num_different:
        return f"{num_different} of {_LENGTHS[_TEXT]} rows of logits have other bits in chunks with other texts than at once, alone"
    return None


def _encoders(runtime: Runtime) -> list[EncoderBlocks]:
    """An input of the encoder for the text and another one for its neighbour, of a block each; none if the model has no encoder."""
    if not isinstance(runtime, EncoderDecoderRuntime):
        return []
    inputs = random_sequences(runtime.config, _ENCODER_LENGTHS, 1, runtime.seq2seq.num_encoder_ids)
    return [EncoderBlocks([block], len(tokens), tokens) for block, tokens in enumerate(inputs, start=1)]
