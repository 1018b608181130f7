"""The calls inside one decoder layer, by what they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.pytorch_utils import Conv1D

from ...native.description import NormDescription, Rows
from .errors import NotNative
from .norms import recognise_norm
from .observation import ModuleCall, Observation, is_linear, same


class NormCall(NamedTuple):
    """A called norm."""

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
