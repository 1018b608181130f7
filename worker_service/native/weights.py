"""Weights in the layout of the native step, packed module by module while torch's copies are let go of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .arena import Arena
from .description import LayerDescription, ModelDescription, NormDescription, Rows
from .library import Layer, Library, Linear, Norm, Sizes


class PackedModel:
    """The C structures of a model, with the tensors that they point to. Without KV: that belongs to a Program."""

    def __init__(self, description: ModelDescription, library: Library) -> None:
        """Packs the weights. The modules' weights are empty afterwards: the torch model cannot run any more."""
        self.library = library
        self.dtype = description.dtype
        self.hidden_size = description.hidden_size
        self.vocab_size = description.vocab_size
        self._tensors: list[torch.Tensor] = []
        self._arena = Arena()
        self.sizes = Sizes(hidden=self.hidden_size, vocab=self.vocab_size, num_layers=len(description.layers))
        self.sizes.embedding_scale = description.embedding_scale
        self.sizes.residual_scale = description.residual_scale
        if description.positions is not None:
            self.sizes.positions = self._keep(description.positions.detach().to(self.dtype).contiguous())
            self.sizes.position_offset = description.position_offset
        self.sizes.embedding_norm = self._norm(description.embedding_norm)
        self.sizes.last_norm = self._norm(description.last_norm)
        is_tied = description.is_tied
        self.sizes.head = self._linear([description.head])
        if is_tied:
            self.sizes.embedding, self.sizes.embedding_is_packed = self.sizes.head.weight, 1
            _release(description.embedding)
        else:
            self.sizes.embedding = self._keep(description.embedding.weight.detach().contiguous())  # type: ignore[operator]
        self.layers = [self._layer(layer) for layer in description.layers]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)

    def _layer(self, description: LayerDescription) -> Layer:
        layer = Layer(
            heads=description.num_heads,
            kv_heads=description.num_kv_heads,
            head_size=description.head_size,
            window=description.window or 0,
            scaling=description.scaling,
            softcap=description.softcap or 0.0,
            activation=description.activation,
        )
        for name in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
            setattr(layer, name, self._norm(getattr(description, name)))
        norms = description.head_norms
        layer.q_norm = self._head_norm(norms.query, description.num_heads, description.head_size)
        layer.k_norm = self._head_norm(norms.key, description.num_kv_heads, description.head_size)
        layer.head_norms_are_whole, layer.head_norms_follow_rotation = norms.are_whole, norms.follow_rotation
        layer.is_parallel = description.is_parallel
        if description.rotary is not None:
            layer.cos, layer.sin = self._keep(description.rotary.cos), self._keep(description.rotary.sin)
            layer.rotary, layer.rotary_is_interleaved = description.rotary.size, description.rotary.is_interleaved
        layer.qkv = self._linear([description.query, description.key, description.value])
        layer.out = self._linear([description.out])
        if description.gate is None:
            layer.up = self._linear([description.up])
        else:
            layer.up, layer.is_gated = self._gated(description.gate, description.up), 1
        layer.down = self._linear([description.down], min_inputs=layer.up.n // 2 if layer.is_gated else layer.up.n)
        return layer

    def _norm(self, norm: NormDescription | None) -> Norm:
        if norm is None:
            return Norm()
        weight = None if norm.weight is None else self._keep(norm.weight)
        bias = None if norm.bias is None else self._keep(norm.bias)
        return Norm(weight, bias, norm.epsilon, norm.is_centered, 1, 0)

    def _head_norm(self, norm: NormDescription | None, heads: int, head_size: int) -> Norm:
        """With a weight for each number of each head."""
        if norm is None:
            return Norm()
        weight, bias = (
            None if one is None else one.view(-1, head_size).expand(heads, head_size).flatten()
            for one in (norm.weight, norm.bias)
        )
        return self._norm(norm._replace(weight=weight, bias=bias))

    def _linear(self, parts: Sequence[Rows], min_inputs: int = 0) -> Linear:
        """One product of several weights. min_inputs: more inputs than the weight has, which count for nothing."""
        weights = [(at, part.weight()) for at, part in zip(_starts(parts), parts, strict=True)]
        bias = None
        if any(part.bias() is not None for part in parts):
            bias = torch.cat([_bias_or_zeros(part) for part in parts])
        return self._packed(weights, bias, sum(part.num_outputs for part in parts), min_inputs, parts)

    def _gated(self, gate: Rows, up: Rows) -> Linear:
        """A vector of gate's outputs, one of up's, in turn; their number is rounded up to whole vectors."""
        width = self.library.words_per_vector
        vectors = -(-gate.num_outputs // width)
        weights: list[tuple[int, torch.Tensor]] = []
        for place, part in enumerate((gate, up)):
            weight = part.weight()
            weights += [
                ((2 * vector + place) * width, weight[vector * width : (vector + 1) * width])
                for vector in range(vectors)
            ]
        bias = None
        if gate.bias() is not None or up.bias() is not None:
            both = torch.zeros(2, vectors * width)
            for row, part in zip(both, (gate, up), strict=True):
                row[: part.num_outputs] = _bias_or_zeros(part)
            bias = both.view(2, vectors, width).transpose(0, 1).reshape(-1)
        return self._packed(weights, bias, 2 * vectors * width, 0, (gate, up))

    def _packed(
        self,
        weights: Sequence[tuple[int, torch.Tensor]],
        bias: torch.Tensor | None,
        num_outputs: int,
        min_inputs: int,
        parts: Sequence[Rows],
    ) -> Linear:
        """weights: (first output, rows). Empties the parts' modules."""
        width, in_word = self.library.words_per_vector, self.library.numbers_per_word
        num_inputs = weights[0][1].shape[1]
        padded_inputs = max(min_inputs, -(-num_inputs // in_word) * in_word)
        packed = self._arena.zeros(-(-num_outputs // width) * width * padded_inputs, self.dtype)
        for first, rows in weights:
            if padded_inputs != num_inputs:
                rows = torch.nn.functional.pad(rows, (0, padded_inputs - num_inputs))
            assert rows.dtype == self.dtype, rows.dtype
            assert rows.is_contiguous()
            self.library.functions.kvpool_pack(packed.data_ptr(), rows.data_ptr(), first, len(rows), padded_inputs)
        for part in parts:
            _release(part.module)
        return Linear(self._keep(packed), None if bias is None else self._keep(bias), num_outputs, padded_inputs)

    def _keep(self, tensor: torch.Tensor) -> int:
        """Its address; the tensor lives as long as this object."""
        if not any(tensor is kept for kept in self._tensors):
            self._tensors.append(tensor)
        return tensor.data_ptr()


def _starts(parts: Sequence[Rows]) -> list[int]:
    return [sum(part.num_outputs for part in parts[:index]) for index in range(len(parts))]


def _bias_or_zeros(part: Rows) -> torch.Tensor:
    bias = part.bias()
    return torch.zeros(part.num_outputs) if bias is None else bias


def _release(module: torch.nn.Module) -> None:
    """Let go of the module's weight."""
    weight = module.weight
    module.weight = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)  # type: ignore[arg-type]
