"""Linear layers on a CPU with weights laid out once for oneDNN, instead of in every call."""

from __future__ import annotations

from functools import cache

import torch


class PackedLinear(torch.nn.Module):
    """Computes what the given Linear does; holds its weight in oneDNN's own layout."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # An opaque tensor of the same shape and dtype: some models look at these.
        self.weight = _pack(linear.weight.detach())
        self.bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.numel() == 0:  # no row of the step wants logits; oneDNN takes no empty matrices
            return inputs.new_empty(*inputs.shape[:-1], self.out_features)
        return _apply(inputs, self.weight, self.bias)


def pack_linears(model: torch.nn.Module) -> int:
    """Replace every plain Linear in the model, in place, so that the unpacked weights can be freed.

    Returns how many were replaced: 0 where this torch or CPU cannot.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and packing_works(child.weight.dtype):
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed


def _apply(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return result


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
