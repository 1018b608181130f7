"""Facts for planning the KV cache, of a loaded model and of a model without weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..control_groups import read_cpu_memory
from ..errors import UnsupportedModel
from ..forward.contract import Runtime
from ..forward.kv_plan import CrossPlan, GroupPlan
from ..forward.layers import AttentionLayer, groups_of
from ..forward.mixer import state_bytes
from ..settings import MemorySettings
from .meta_model import MetaModel, build_meta_model
from .plan import MemoryFacts
from .profile import CUDAMeter, MakeRunner, measure_batch

_ESTIMATED = "estimated without attention"


def kv_bytes_per_token(layers: Sequence[AttentionLayer], dtype: torch.dtype) -> int:
    """K and V of all layers that store them, for a token of the text."""
    storing = [layer for layer in layers if layer.source is None and not layer.needs.is_cross]
    return _bytes_per_token(storing, dtype)


def cross_needs(
    layers: Sequence[AttentionLayer], dtype: torch.dtype, max_encoder_tokens: int | None
) -> CrossPlan | None:
    """The group of the layers that attend to an encoder's output of at most so many tokens, without blocks. None: there is no
    encoder."""
    if max_encoder_tokens is None:
        return None
    return CrossPlan(
        0, _bytes_per_token([layer for layer in layers if layer.needs.is_cross], dtype), max_encoder_tokens
    )


def _bytes_per_token(storing: Sequence[AttentionLayer], dtype: torch.dtype) -> int:
    return (
        sum(layer.needs.num_kv_heads * (layer.needs.k_head_dim + layer.needs.v_head_dim) for layer in storing)
        * dtype.itemsize
    )


def group_needs(layers: Sequence[AttentionLayer], dtype: torch.dtype) -> list[GroupPlan]:
    """The groups of these layers, see groups_of, without blocks."""
    return [
        GroupPlan(number, window, 0, kv_bytes_per_token([layers[index] for index in members], dtype))
        for number, (window, members) in enumerate(groups_of(layers).items())
    ]


def facts_of_loaded(
    runtime: Runtime,
    max_model_len: int,
    settings: MemorySettings,
    make_runner: MakeRunner,
    max_encoder_tokens: int | None = None,
) -> MemoryFacts:
    """Facts of a loaded model. max_encoder_tokens: of the encoder's longest input; None: there is no encoder. On a GPU a maximum
    batch runs, on a CPU its needs are estimated.

    Raises ModelError if the batch does not fit, or the memory is unknown.
    """
    layers, dtype, device = runtime.layers, runtime.dtype, runtime.device
    bytes_per_token, of_states = kv_bytes_per_token(layers, dtype), state_bytes(runtime.mixers)
    if device.type != "cuda":
        num_bytes = runtime.num_bytes()
        activations, origin = _estimated(runtime.config, dtype, settings, max_encoder_tokens)
        total, available = read_cpu_memory()
        return MemoryFacts(
            device=str(device),
            total_bytes=total,
            other_bytes=max(0, total - available - num_bytes),
            weight_bytes=num_bytes,
            activation_bytes=activations,
            bytes_per_token=bytes_per_token,
            state_bytes=of_states,
            activations_from=origin,
        )
    weights = torch.cuda.memory_allocated(device)
    cross = cross_needs(layers, dtype, max_encoder_tokens)
    needs = measure_batch(make_runner, CUDAMeter(device), settings, max_model_len, bytes_per_token, of_states, cross)
    free, total = torch.cuda.mem_get_info(device)
    return MemoryFacts(
        device=str(device),
        total_bytes=total,
        # After the batch: by then the driver and the libraries have allocated what they keep.
        other_bytes=max(0, total - free - torch.cuda.memory_reserved(device)),
        weight_bytes=weights,
        activation_bytes=needs.activations,
        bytes_per_token=bytes_per_token,
        state_bytes=of_states,
        workspace_bytes_per_token=needs.workspace_per_token,
    )


def facts_of_meta_model(
    meta_model: MetaModel,
    dtype: torch.dtype,
    device: torch.device,
    settings: MemorySettings,
    is_quantized: bool = False,
) -> MemoryFacts:
    """Facts of a model without weights; allocates nothing. Raises ModelError if a fact is unknown."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        total, free = read_cpu_memory()
    return MemoryFacts(
        device=str(device),
        total_bytes=total,
        other_bytes=total - free,
        weight_bytes=meta_model.weight_bytes(dtype, device, is_quantized),
        activation_bytes=meta_model.activation_bytes(dtype, settings.max_num_batched_tokens, settings.max_num_seqs),
        bytes_per_token=kv_bytes_per_token(meta_model.layers, dtype),
        state_bytes=state_bytes(meta_model.mixers, dtype),
        activations_from=_ESTIMATED,
    )


def _estimated(
    config: Any, dtype: torch.dtype, settings: MemorySettings, max_encoder_tokens: int | None
) -> tuple[int, str]:
    try:
        meta_model = build_meta_model(config, max_encoder_tokens)
        estimate = meta_model.activation_bytes(dtype, settings.max_num_batched_tokens, settings.max_num_seqs)
    except UnsupportedModel:
        return 0, "unknown: the model does not run without values"
    return estimate, _ESTIMATED
