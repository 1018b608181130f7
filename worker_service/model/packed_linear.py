"""Linear layers on a CPU with weights laid out once for oneDNN, instead of in every call."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D


class PackedLinear(torch.nn.Module):
    """Computes inputs · weightᵀ + bias; holds the weight [out_features, in_features] in oneDNN's own layout.

    In float32 the bits of a row do not depend on how many rows there are, which cannot be said of torch's own Linear.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # An opaque tensor of the same shape and dtype: some models look at these.
        self.weight = _pack(weight.detach())
        self.bias = bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        num_rows = inputs.numel() // self.in_features
        if num_rows == 0:  # no row of the step wants logits; oneDNN takes no empty matrices
            return inputs.new_empty(*inputs.shape[:-1], self.out_features)
        if num_rows == 1 and inputs.dtype == torch.float32:
            # One row alone takes a way of its own through oneDNN, with sums in another order.
            twice = inputs.reshape(1, -1).expand(2, -1).contiguous()
            return _apply(twice, self.weight, self.bias)[:1].view(*inputs.shape[:-1], self.out_features)
        return _apply(inputs, self.weight, self.bias)


def pack_linears(model: torch.nn.Module) -> int:
    """Replace every plain Linear in the model, and its transposed form Conv1D, in place, so that the unpacked weights can be freed.

    Returns how many were replaced: 0 where this torch or CPU cannot.
    """
    count = 0
    # Only modules with children: a list that held the layers too would keep every unpacked weight until the last one is packed.
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
    """Whether a module takes its child's weight and multiplies by itself: an opaque one would be of no use to it."""
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


def tell_of_variance(dtype: torch.dtype, device: torch.device) -> str | None:
    """What a user is told where bits will depend on the batch that would not elsewhere; None: nothing."""
    if device.type != "cpu" or dtype != torch.float32 or packing_works(dtype):
        return None
    return (
        "torch has no oneDNN products for float32 here, so the last bits of a token's logits depend on what else is in the step: "
        "where two tokens are nearly as likely, the same request may get another text, with a seed too; needed for one text: "
        "a torch that is built with oneDNN (MKLDNN)"
    )


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether these operators, which torch's compiler uses but does not document, exist here and compute a product."""
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
