"""Weights in the layout of the native step, packed module by module while torch's copies are let go of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from ...huge_pages import zero_pages
from ..description import LayerDescription, ModelDescription, NormDescription, Rows
from .library import Layer, Library, Linear, ModelSizes, Norm

_WORD = 4
"""Bytes."""


class PackedModel:
    """The C structures of a model, with the tensors that they point to. Without KV: that belongs to a Program."""

    def __init__(self, description: ModelDescription, library: Library, is_quantized: bool = False) -> None:
        """Packs the weights, as int8 if they are to be quantized. The modules' weights are empty afterwards: the torch model cannot
        run any more."""
        self.library = library
        self._is_quantized = is_quantized
        self.dtype = description.dtype
        self.hidden_size = description.hidden_size
        self.vocab_size = description.vocab_size
        self._tensors: list[torch.Tensor] = []
        self._arena = Arena()
        self.sizes = ModelSizes(hidden=self.hidden_size, vocab=self.vocab_size, num_layers=len(description.layers))
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
        """Bytes of all packed tensors together."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)

    def _layer(self, description: LayerDescription) -> Layer:
        attention, mlp = description.attention, description.mlp
        layer = Layer(
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            head_size=attention.head_size,
            window=attention.window or 0,
            scaling=attention.scaling,
            softcap=attention.softcap or 0.0,
            activation=mlp.activation,
        )
        for name in ("before_attention", "after_attention", "before_mlp", "after_mlp"):
            setattr(layer, name, self._norm(getattr(description, name)))
        norms = attention.norms
        layer.q_norm = self._head_norm(norms.query, attention.num_heads, attention.head_size)
        layer.k_norm = self._head_norm(norms.key, attention.num_kv_heads, attention.head_size)
        layer.head_norms_are_whole, layer.head_norms_follow_rotation = norms.are_whole, norms.follow_rotation
        layer.is_parallel = description.is_parallel
        if (rotary := attention.rotary) is not None:
            layer.cos, layer.sin = self._keep(rotary.cos), self._keep(rotary.sin)
            layer.rotary, layer.rotary_is_interleaved = rotary.size, rotary.is_interleaved
        layer.qkv = self._linear([attention.query, attention.key, attention.value])
        layer.out = self._linear([attention.out])
        if mlp.gate is None:
            layer.up = self._linear([mlp.up])
        else:
            layer.up, layer.is_gated = self._gated(mlp.gate, mlp.up), 1
        layer.down = self._linear([mlp.down], min_inputs=layer.up.n // 2 if layer.is_gated else layer.up.n)
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
        *starts, num_outputs = accumulate((part.num_outputs for part in parts), initial=0)
        linear = self._packed(zip(starts, parts, strict=True), num_outputs, min_inputs)
        if any(part.bias() is not None for part in parts):
            linear.bias = self._keep(torch.cat([_bias_or_zeros(part) for part in parts]))
        return linear

    def _gated(self, gate: Rows, up: Rows) -> Linear:
        """A vector of gate's outputs, one of up's, in turn; their number is rounded up to whole vectors."""
        width = self.library.words_per_vector
        vectors = -(-gate.num_outputs // width)
        linear = self._packed(((0, gate), (width, up)), 2 * vectors * width, stride=2 * width)
        if gate.bias() is not None or up.bias() is not None:
            both = torch.zeros(2, vectors * width)
            for row, part in zip(both, (gate, up), strict=True):
                row[: part.num_outputs] = _bias_or_zeros(part)
            linear.bias = self._keep(both.view(2, vectors, width).transpose(0, 1).reshape(-1))
        return linear

    def _packed(
        self, parts: Iterable[tuple[int, Rows]], num_outputs: int, min_inputs: int = 0, stride: int | None = None
    ) -> Linear:
        """parts: (output of the first row, rows). stride: outputs from one vector of rows to the next; None: they follow each
        other. Empties the parts' modules."""
        parts = list(parts)
        width, dtype = self.library.words_per_vector, torch.uint8 if self._is_quantized else self.dtype
        in_word = _WORD // dtype.itemsize
        num_inputs = parts[0][1].weight().shape[1]
        padded_inputs = -(-max(min_inputs, num_inputs) // in_word) * in_word
        padded_outputs = -(-num_outputs // width) * width
        packed = self._arena.zeros(padded_outputs * padded_inputs, dtype)
        scales = torch.zeros(padded_outputs) if self._is_quantized else None
        for first, part in parts:
            rows = part.weight()
            assert rows.dtype == self.dtype, rows.dtype
            if scales is not None:
                rows, steps = quantize(rows)
            if padded_inputs != num_inputs:
                rows = torch.nn.functional.pad(rows, (0, padded_inputs - num_inputs))
            assert rows.is_contiguous()
            each = len(rows) if stride is None else width
            for start in range(0, len(rows), each):
                at = first + start if stride is None else first + start // width * stride
                some = rows[start : start + each]
                words = padded_inputs // in_word
                self.library.functions.kvpool_pack(packed.data_ptr(), some.data_ptr(), at, len(some), words)
                if scales is not None:
                    scales[at : at + len(some)] = steps[start : start + each]
        for _, part in parts:
            _release(part.module)
        return Linear(
            weight=self._keep(packed),
            scales=None if scales is None else self._keep(scales),
            n=num_outputs,
            k=padded_inputs,
        )

    def _keep(self, tensor: torch.Tensor) -> int:
        """Its address; the tensor lives as long as this object."""
        if not any(tensor is kept for kept in self._tensors):
            self._tensors.append(tensor)
        return tensor.data_ptr()


def _bias_or_zeros(part: Rows) -> torch.Tensor:
    bias = part.bias()
    return torch.zeros(part.num_outputs) if bias is None else bias


def _release(module: torch.nn.Module) -> None:
    """Let go of the module's weight."""
    weight = module.weight
    module.weight = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)  # type: ignore[arg-type]


_LARGEST = 127
_ADDED = 128
"""csrc/quantized.h says why."""


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [outputs, inputs] to the nearest of the steps of each output, its largest number / 127.

    Returns numbers, uint8 [outputs, inputs], and scales, float32 [outputs]: weight ≈ (numbers − 128) · scales. NaN or infinity in
    an output makes its scale NaN or infinite, and so what it computes.
    """
    exact = weight.float()
    scales = exact.abs().amax(1) / _LARGEST
    factors = torch.where(scales > 0, 1 / scales, 0.0)
    numbers = exact.mul_(factors[:, None]) if exact is not weight else exact * factors[:, None]
    return numbers.round_().nan_to_num_(0).clamp_(-_LARGEST, _LARGEST).add_(_ADDED).to(torch.uint8), scales


_CHUNK = 64 << 20
"""Bytes mapped at a time; what is not used takes no memory."""
_ALIGNMENT = 64
"""Bytes: a cache line, and a vector of AVX-512."""


class Arena:
    """Zeroed tensors in few large mappings, which live as long as their tensors.

    Tensors that are read one after the other should be asked for in this order: what a step prefetches after the end of one is then
    the next. And most are smaller than a huge page.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """[count], at a multiple of 64 bytes. Raises OSError if the system has no memory."""
        size = count * dtype.itemsize
        if self._used + size > len(self._chunk):
            self._chunk, self._used = zero_pages(max(size, _CHUNK)), 0
        found = self._chunk[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return found.view(dtype)
