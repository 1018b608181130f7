"""Q, K, V and output of an attention module: which outputs of which linear layers, normed and rotated how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ...native.description import AttentionDescription, HeadNorms, NormDescription, Rows
from ..errors import NotNative
from ..forward.layers import AttentionLayer
from .layer_calls import LayerCalls, outputs_of
from .observation import TOLERANCE, ModuleCall, ObservedAttention, same
from .rotation import Rotation, Table, find_rotation


class Attention(NamedTuple):
    """An attention module."""

    inputs: torch.Tensor
    """[tokens, hidden size] float32, of the linear layers of Q, K and V."""
    outputs: torch.Tensor
    """[tokens, hidden size], of the last linear layer."""
    description: AttentionDescription
    linears: set[torch.nn.Module]


class _Piece(NamedTuple):
    """Outputs of a linear layer."""

    call: ModuleCall
    outputs: slice | torch.Tensor

    @property
    def numbers(self) -> torch.Tensor:
        """[tokens, outputs]"""
        return self.call.output_rows[:, self.outputs]

    def rows(self) -> Rows:
        return outputs_of(self.call.module, self.outputs)


class _Way(NamedTuple):
    """The steps that lead from outputs of a linear layer to the queries or keys that attend."""

    piece: _Piece
    norm: NormDescription | None
    is_normed_after_rotation: bool
    is_normed_whole: bool
    rotation: Rotation | None
    scale: float


def recognise_attention(
    attention: AttentionLayer, attended: ObservedAttention, layer: LayerCalls, tables: Sequence[Table]
) -> Attention:
    """Raises NotNative."""
    pieces = [piece for call in layer.linears for piece in _pieces(call, attention)]
    value = next((piece for piece in pieces if same(piece.numbers, attended.value)), None)
    if value is None:
        raise NotNative("its values are not the outputs of a linear layer")
    inputs = value.call.input_rows
    pieces = [piece for piece in pieces if same(piece.call.input_rows, inputs)]
    query = _way(pieces, attended.query, attention, layer, tables, "queries")
    key = _way(pieces, attended.key, attention, layer, tables, "keys")
    if any(
        getattr(query, name) != getattr(key, name)
        for name in ("is_normed_after_rotation", "is_normed_whole", "rotation")
    ):
        raise NotNative("its queries and keys are normed or rotated in different ways")
    if key.scale != 1:
        raise NotNative(f"its keys are multiplied by {key.scale:.4g}")
    out = next((call for call in layer.linears if same(call.input_rows, attended.output)), None)
    if out is None:
        raise NotNative("what attention returns is changed before its last linear layer")
    modules = {piece.call.module for piece in (query.piece, key.piece, value)}
    used = [call for call in layer.linears if call.module in modules]
    widths = [piece.numbers.shape[1] for piece in (query.piece, key.piece, value)]
    if sum(widths) != sum(call.output_rows.shape[1] for call in used):
        raise NotNative("its linear layers have more outputs than queries, keys and values")
    description = AttentionDescription(
        num_heads=attention.needs.num_heads,
        num_kv_heads=attention.needs.num_kv_heads,
        head_size=attention.needs.k_head_dim,
        scaling=attention.call.scaling * query.scale,
        window=attention.needs.window,
        softcap=attention.call.softcap,
        query=query.piece.rows(),
        key=key.piece.rows(),
        value=value.rows(),
        out=outputs_of(out.module),
        rotary=None if query.rotation is None else query.rotation.description(),
        norms=HeadNorms(query.norm, key.norm, query.is_normed_whole, query.is_normed_after_rotation),
    )
    return Attention(inputs, out.output_rows, description, modules | {out.module})


def _pieces(call: ModuleCall, attention: AttentionLayer) -> Iterator[_Piece]:
    """What may be Q, K or V: all outputs, or those of one of the usual layouts."""
    heads, kv_heads, size = attention.needs.num_heads, attention.needs.num_kv_heads, attention.needs.k_head_dim
    group, num_outputs = heads // kv_heads, call.output_rows.shape[1]
    yield _Piece(call, slice(None))
    if num_outputs == (heads + 2 * kv_heads) * size:
        for first, width in ((0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads)):
            yield _Piece(call, slice(first * size, (first + width) * size))
        # For each KV head: its queries, its key, its value.
        by_head = torch.arange(num_outputs).view(kv_heads, group + 2, size)
        for part in (by_head[:, :group], by_head[:, group], by_head[:, group + 1]):
            yield _Piece(call, part.flatten())
    if num_outputs == 2 * kv_heads * size:
        for first in (0, kv_heads):
            yield _Piece(call, slice(first * size, (first + kv_heads) * size))


def _way(
    pieces: Sequence[_Piece],
    wanted: torch.Tensor,
    attention: AttentionLayer,
    layer: LayerCalls,
    tables: Sequence[Table],
    name: str,
) -> _Way:
    size, tolerance = attention.needs.k_head_dim, TOLERANCE[layer.dtype]
    for piece in pieces:
        numbers = piece.numbers
        if numbers.shape != wanted.shape:
            continue
        before = layer.norm_with_inputs(numbers)
        after = layer.norm_with_outputs(wanted) if before is None else None
        norm = before or after
        turn = find_rotation(
            numbers if before is None else before.call.output_rows,
            wanted if after is None else after.call.input_rows,
            size,
            tables,
            tolerance,
        )
        if turn is None:
            continue
        rotation, scale = turn
        if after is not None and scale != 1:
            continue
        return _Way(
            piece,
            None if norm is None else norm.description,
            after is not None,
            norm is not None and norm.call.inputs is not None and norm.call.inputs.shape[-1] != size,
            rotation,
            scale,
        )
    raise NotNative(f"its {name} are not the outputs of a linear layer, normed and rotated in a known way")
