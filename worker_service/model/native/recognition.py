"""A model's description for the native step, from a recorded forward pass; no model is known by name.

What is recognised may still be wrong, for a model may do more than shows. So the check after packing decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from ...native.description import LayerDescription, ModelDescription, NormDescription
from ..errors import NotNative
from ..forward.layers import AttentionLayer
from .attention import recognise_attention
from .layer_calls import LayerCalls, layer_calls, outputs_of, recognise_norm
from .mlp import recognise_mlp
from .observation import TOLERANCE, Observation, ObservedAttention, difference, factor, is_linear, observe, same
from .rotation import Table, rotary_tables

_MOST_OFFSET = 8
"""Rows of a table of positions before that of position 0 are fewer."""


def describe(model: Any, layers: Sequence[AttentionLayer], dtype: torch.dtype, max_model_len: int) -> ModelDescription:
    """Raises NotNative with the first thing that the native step does not know."""
    if len({layer.module for layer in layers}) < len(layers):
        raise NotNative("a layer attends several times")
    for layer in layers:
        _check_heads(layer)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not is_linear(head):
        raise NotNative(f"its head is a {type(head).__name__}, not a linear layer")
    hidden_size = embedding.weight.shape[1]
    if hidden_size % 2 or head.weight.shape[1] != hidden_size:
        raise NotNative(
            f"its embedding has {hidden_size} numbers, its head {head.weight.shape[1]}; needed: the same, even"
        )
    decoder_layers = _decoder_layers(model, layers)
    seen = observe(model, layers, decoder_layers, max_model_len)
    tables, scales = rotary_tables(seen, max_model_len), _possible_scales(model.config)
    calls = [layer_calls(decoder_layer, seen, dtype) for decoder_layer in decoder_layers]
    for before, after in pairwise(calls):
        if not same(after.inputs, before.outputs):
            raise NotNative("a layer gets other numbers than those that the layer before it returns")
    described = [
        _layer(own, layer, seen.attended[layer.module], tables) for own, layer in zip(calls, layers, strict=True)
    ]
    start = _start(embedding, calls[0], seen, scales, max_model_len)
    return ModelDescription(
        dtype=dtype,
        hidden_size=hidden_size,
        vocab_size=head.weight.shape[0],
        embedding=embedding,
        head=outputs_of(head),
        last_norm=_last_norm(head, calls[-1], seen),
        embedding_norm=start.norm,
        layers=[description for description, _ in described],
        positions=start.positions,
        position_offset=start.offset,
        embedding_scale=start.scale,
        residual_scale=_residual_scale([one for _, sums in described for one in sums], scales, TOLERANCE[dtype]),
    )


class _Sum(NamedTuple):
    """Numbers of the residual that were added; all [tokens, hidden size]."""

    before: torch.Tensor
    added: torch.Tensor
    """Without the residual scale."""
    after: torch.Tensor


def _layer(
    calls: LayerCalls, layer: AttentionLayer, attended: ObservedAttention, tables: Sequence[Table]
) -> tuple[LayerDescription, list[_Sum]]:
    attention = recognise_attention(layer, attended, calls, tables)
    mlp = recognise_mlp([call for call in calls.linears if call.module not in attention.linears], calls)
    before_attention, residual = _normed(attention.inputs, calls)
    if not same(residual, calls.inputs):
        raise NotNative("its attention gets other numbers than its layer, or a norm of them")
    before_mlp, residual = _normed(mlp.inputs, calls)
    after_attention, by_attention = _after(attention.outputs, calls)
    after_mlp, by_mlp = _after(mlp.outputs, calls)
    is_parallel = same(residual, calls.inputs)
    if is_parallel:
        sums = [_Sum(calls.inputs, by_attention + by_mlp, calls.outputs)]
    else:
        sums = [_Sum(calls.inputs, by_attention, residual), _Sum(residual, by_mlp, calls.outputs)]
    description = LayerDescription(
        attention.description, mlp.description, before_attention, after_attention, before_mlp, after_mlp, is_parallel
    )
    return description, sums


def _normed(numbers: torch.Tensor, calls: LayerCalls) -> tuple[NormDescription | None, torch.Tensor]:
    """The norm that has these outputs, and its inputs; without one the numbers themselves."""
    norm = calls.norm_with_outputs(numbers)
    return (None, numbers) if norm is None else (norm.description, norm.call.input_rows)


def _after(numbers: torch.Tensor, calls: LayerCalls) -> tuple[NormDescription | None, torch.Tensor]:
    """The norm that has these inputs, and its outputs; without one the numbers themselves."""
    norm = calls.norm_with_inputs(numbers)
    return (None, numbers) if norm is None else (norm.description, norm.call.output_rows)


def _residual_scale(sums: Sequence[_Sum], possible: Sequence[float], tolerance: float) -> float:
    """The factor of all that layers add to the residual. Raises NotNative."""
    found = median(factor(one.added, one.after - one.before) for one in sums)
    scale = min(possible, key=lambda value: abs(value - found))
    if not all(difference(one.before + scale * one.added, one.after) <= tolerance for one in sums):
        raise NotNative("its layers do more to the residual than to add attention and the MLP")
    return scale


def _check_heads(attention: AttentionLayer) -> None:
    if attention.needs.k_head_dim != attention.needs.v_head_dim or attention.call.sinks is not None:
        raise NotNative(
            "its heads of K and V differ in size" if attention.call.sinks is None else "it has attention sinks"
        )


def _decoder_layers(model: Any, layers: Sequence[AttentionLayer]) -> list[torch.nn.Module]:
    """The modules of the list of layers, one for each attention module, in order."""
    for modules in model.modules():
        if not isinstance(modules, torch.nn.ModuleList) or len(modules) != len(layers):
            continue
        if all(layer.module in set(one.modules()) for one, layer in zip(modules, layers, strict=True)):
            return list(modules)
    raise NotNative("its layers are not one list of modules, each with one attention")


class _Start(NamedTuple):
    """What the first layer gets."""

    scale: float
    """The factor by which the embedding's rows are multiplied."""
    positions: torch.Tensor | None = None
    offset: int = 0
    norm: NormDescription | None = None


def _start(
    embedding: torch.nn.Module, first: LayerCalls, seen: Observation, scales: Sequence[float], max_model_len: int
) -> _Start:
    others = [
        call for call in seen.calls if isinstance(call.module, torch.nn.Embedding) and call.module is not embedding
    ]
    weight = embedding.weight.detach()[seen.ids].float()  # type: ignore[operator]
    if len(others) > 1:
        raise NotNative("it has several tables in addition to its embedding; needed: one at most, of positions")
    start, added = _Start(1.0), torch.zeros(1)
    for call in others:
        added = call.output_rows
        start = _positions(call.module.weight.detach(), added, seen.positions, max_model_len)  # type: ignore[operator]
    norm, embedded = _normed_anywhere(first.inputs, seen)
    scale = factor(weight, embedded - added, scales)
    if not difference(weight * scale + added, embedded) <= TOLERANCE[first.dtype]:
        raise NotNative(
            "its first layer gets other numbers than rows of its embedding times a factor, with positions added, or a norm of them"
        )
    return start._replace(scale=scale, norm=norm)


def _positions(table: torch.Tensor, added: torch.Tensor, positions: torch.Tensor, max_model_len: int) -> _Start:
    for offset in range(_MOST_OFFSET):
        if max_model_len + offset > len(table):
            break
        if same(table[positions + offset].float(), added):
            return _Start(1.0, table, offset)
    raise NotNative(
        f"its second table has {len(table)} rows, which are not those of its {max_model_len} positions in order"
    )


def _last_norm(head: torch.nn.Module, last: LayerCalls, seen: Observation) -> NormDescription | None:
    (of_head,) = seen.of([head])
    norm, numbers = _normed_anywhere(of_head.input_rows, seen)
    if not same(numbers, last.outputs):
        raise NotNative("its head gets other numbers than the last layer's, or a norm of them")
    return norm


def _normed_anywhere(numbers: torch.Tensor, seen: Observation) -> tuple[NormDescription | None, torch.Tensor]:
    """The norm that has these outputs, and its inputs; without one the numbers themselves."""
    found = (call for call in seen.calls if call.inputs is not None and call.outputs)
    for call in (call for call in found if same(call.output_rows, numbers)):
        if (norm := recognise_norm(call)) is not None:
            return norm, call.input_rows
    return None, numbers


def _possible_scales(config: Any) -> list[float]:
    """1, and the numbers of the config, of which some are factors."""
    fields = config.get_text_config(decoder=True).to_dict()
    return [1.0, *(float(value) for value in fields.values() if isinstance(value, int | float) and value)]
