"""Linear layers on a CPU with weights in oneDNN's layout, converted once instead of in every call."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

_TRIED_ROWS = ((200, 1 << 20), (40, 1 << 62))
"""(rows, largest number of weights for these): a large layer is tried with fewer rows, because it is slow."""


class PackedLinear(torch.nn.Module):
    """Computes inputs · weightᵀ + bias; holds the weight [out_features, in_features] in oneDNN's layout.

    In float32 the bits of a row do not depend on the number of rows, unlike those of torch's Linear.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # An opaque tensor of the same shape and dtype, because some models read these.
        self.weight = _pack(weight.detach())
        self.bias = bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        num_rows = inputs.numel() // self.in_features
        if num_rows == 0:  # no row of the step needs logits; oneDNN accepts no empty matrices
            return inputs.new_empty(*inputs.shape[:-1], self.out_features)
        if (num_padded := padded_rows(num_rows)) == num_rows:
            return _apply(inputs, self.weight, self.bias)
        rows = torch.nn.functional.pad(inputs.reshape(num_rows, -1), (0, 0, 0, num_padded - num_rows))
        return _apply(rows, self.weight, self.bias)[:num_rows].view(*inputs.shape[:-1], self.out_features)


def padded_rows(num_rows: int) -> int:
    """The number of rows of the product that computes `num_rows` (at least 1): above 16 at most an eighth more, zeros.

    oneDNN generates code for each number of rows that it meets and keeps it: 0.2 MB each, up to a gigabyte in a process. So it
    meets 71 numbers up to 2,048. A single row is two, because for one it has another kernel, with sums in another order.
    """
    if num_rows <= 16:
        return max(2, num_rows)
    step = 1 << (num_rows - 1).bit_length() - 4
    return -(-num_rows // step) * step


def pack_linears(model: torch.nn.Module) -> int:
    """Replace every plain Linear of the model, and its transposed form Conv1D, in place, so that the unpacked weights can be freed.

    Returns the number of replacements; 0 if this torch or CPU does not support them.
    """
    count = 0
    # Only modules with children: a list with the layers would keep every unpacked weight until the last one is packed.
    for parent in [module for module in model.modules() if next(module.children(), None) is not None]:
        kind: Any = type(parent)
        for name, child in list(parent.named_children()):
            packed = None if _reads_weight(kind, name) else _packed(child)
            if packed is not None:
                setattr(parent, name, packed)
                count += 1
    return count


@cache
def _reads_weight(parent: Any, name: str) -> bool:
    """Whether a module reads its child's weight, to multiply by itself: it cannot use an opaque one."""
    try:
        return f"self.{name}.weight" in inspect.getsource(parent.forward)
    except (OSError, TypeError):
        return False


def _packed(module: Any) -> PackedLinear | None:
    kind = type(module)
    if kind not in (torch.nn.Linear, Conv1D) or not packing_works(module.weight.dtype):
        return None
    return PackedLinear(module.weight if kind is torch.nn.Linear else module.weight.t(), module.bias)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def _apply(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return result


def find_variance(model: torch.nn.Module) -> str | None:
    """A packed layer in which the bits of a row depend on other rows, and where; None if none was found.

    Tries one layer of each size. Call it in the thread that will run the steps, with their number of threads.
    """
    layers: dict[tuple[int, int, bool], tuple[str, PackedLinear]] = {}
    for name, module in model.named_modules():
        if type(module) is PackedLinear:
            layers.setdefault((module.in_features, module.out_features, module.bias is None), (name, module))
    with torch.inference_mode():
        for name, layer in layers.values():
            if (pieces := _variance(layer)) is not None:
                first, end, num_rows = pieces
                return (
                    f"{name} ({layer.in_features} → {layer.out_features}): rows {first} … {end - 1} of {num_rows} have other "
                    "bits alone"
                )
    return None


def _variance(layer: PackedLinear) -> tuple[int, int, int] | None:
    """(first, end, number of rows): rows that have other bits alone than with the rest."""
    num_weights = layer.in_features * layer.out_features
    num_rows = next(rows for rows, limit in _TRIED_ROWS if num_weights <= limit)
    inputs = torch.randn(num_rows, layer.in_features, generator=torch.Generator().manual_seed(0))
    whole = layer(inputs)
    for first, end in ((0, 1), (num_rows - 1, num_rows), (7, 9), (3, 20), (1, 32), (31, num_rows), (40, 171)):
        if first < end <= num_rows and not torch.equal(layer(inputs[first:end]), whole[first:end]):
            return first, end, num_rows
    return None


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether these operators, which torch's compiler uses but torch does not document, exist and compute a product."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = torch.linspace(-1, 1, 32 * 16).view(32, 16).to(dtype)
    inputs, bias = weight[:3], weight[:, 0].contiguous()
    try:
        result = _apply(inputs, _pack(weight), bias)
    except (AttributeError, RuntimeError, TypeError):
        return False
    expected = torch.nn.functional.linear(inputs.float(), weight.float(), bias.float())
    return torch.allclose(result.float(), expected, rtol=2e-2, atol=2e-2)
