"""What a norm computes, found by trying it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...native.description import NormDescription
from .observation import ModuleCall

_NUM_TRIED = 3
_SMALL = 3e-3
"""Numbers of this size show epsilon."""
_USUAL_EPSILONS = (*(10.0**-digits for digits in range(3, 13)), torch.finfo(torch.float32).eps)


def recognise_norm(call: ModuleCall) -> NormDescription | None:
    """The RMSNorm or LayerNorm that the called module computes over the last dimension; None if it is neither."""
    module = call.module
    parameters = dict(module.named_parameters())
    if call.inputs is None or len(call.arguments) + len(call.keywords) != 1 or len(call.outputs) != 1:
        return None
    if call.outputs[0].shape != call.inputs.shape or set(parameters) not in (set(), {"weight"}, {"weight", "bias"}):
        return None
    weight, bias = (parameters[name].detach() if name in parameters else None for name in ("weight", "bias"))
    shape = call.inputs.shape[-1:] if weight is None else weight.shape
    if weight is not None and (
        weight.shape[-1:] != call.inputs.shape[-1:] or (bias is not None and bias.shape != shape)
    ):
        return None
    dtype = torch.float32 if weight is None else weight.dtype
    numbers = (torch.randn(_NUM_TRIED, *shape, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    small = _SMALL * numbers
    with torch.inference_mode():
        wanted = [module(tried) for tried in (numbers, small)]
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for norm in _candidates(module, weight, bias):
        pairs = zip((numbers, small), wanted, strict=True)
        if all((_apply(norm, tried) - one.float()).abs().max() <= tolerance * one.abs().max() for tried, one in pairs):
            return norm
    return None


def _candidates(
    module: torch.nn.Module, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> Iterator[NormDescription]:
    named = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    epsilons = [value for value in named if isinstance(value, float)] or _USUAL_EPSILONS
    own = None if weight is None else weight.float()
    # Gemma's norms multiply by 1 + weight.
    factors = [None] if own is None else [own.contiguous(), own + 1]
    for epsilon in epsilons:
        for is_centered in (False, True):
            for scale in factors:
                yield NormDescription(scale, None if bias is None else bias.float().contiguous(), epsilon, is_centered)


def _apply(norm: NormDescription, numbers: torch.Tensor) -> torch.Tensor:
    numbers = numbers.float()
    if norm.is_centered:
        numbers = numbers - numbers.mean(-1, keepdim=True)
    normed = numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + norm.epsilon)
    if norm.weight is not None:
        normed = normed * norm.weight
    return normed if norm.bias is None else normed + norm.bias
