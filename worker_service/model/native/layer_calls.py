"""The calls inside one decoder layer, by what they are. What a norm computes is found by trying it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers.pytorch_utils import Conv1D

from ...native.description import NormDescription, Rows
from ..errors import NotNative
from .observation import ModuleCall, Observation, is_linear, same

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


class NormCall(NamedTuple):
    call: ModuleCall
    description: NormDescription


class LayerCalls(NamedTuple):
    """The calls inside a layer, and its own inputs and outputs [tokens, hidden size] float32."""

    inputs: torch.Tensor
    outputs: torch.Tensor
    linears: list[ModuleCall]
    norms: list[NormCall]
    functions: list[ModuleCall]
    """Calls of modules that have no weights and are no norms, such as activations."""
    dtype: torch.dtype

    def norm_with_inputs(self, numbers: torch.Tensor) -> NormCall | None:
        """The norm that has these inputs [tokens, numbers]; None if none has."""
        return next((norm for norm in self.norms if same(norm.call.input_rows, numbers)), None)

    def norm_with_outputs(self, numbers: torch.Tensor) -> NormCall | None:
        """The norm that has these outputs [tokens, numbers]; None if none has."""
        return next((norm for norm in self.norms if same(norm.call.output_rows, numbers)), None)


def layer_calls(layer: torch.nn.Module, seen: Observation, dtype: torch.dtype) -> LayerCalls:
    """Raises NotNative if a module is called several times, or the layer has weights of other modules."""
    (whole,) = seen.of([layer])
    linears: list[ModuleCall] = []
    norms: list[NormCall] = []
    functions: list[ModuleCall] = []
    for call in seen.of(module for module in layer.modules() if module is not layer):
        if is_linear(call.module):
            linears.append(call)
        elif call.inputs is not None and (norm := recognise_norm(call)) is not None:
            norms.append(NormCall(call, norm))
        elif next(call.module.parameters(), None) is None:
            functions.append(call)
    modules = [call.module for call in linears] + [norm.call.module for norm in norms]
    if len(set(modules)) < len(modules):
        raise NotNative("a layer calls a module several times")
    known = {parameter for module in modules for parameter in module.parameters()}
    for name, parameter in layer.named_parameters():
        if parameter not in known:
            raise NotNative(f"its layers have weights other than those of linear layers and norms, such as {name}")
    return LayerCalls(whole.input_rows, whole.output_rows, linears, norms, functions, dtype)


def outputs_of(linear: Any, outputs: slice | torch.Tensor = slice(None)) -> Rows:
    """These outputs of a linear layer; default: all."""
    is_transposed = type(linear) is Conv1D
    num_outputs = linear.weight.shape[1 if is_transposed else 0]
    return Rows(linear, outputs, len(torch.arange(num_outputs)[outputs]), is_transposed)
