"""The MLP of a layer: which linear layers, and the activation between them, found by trying it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ...native.description import Activation, MLPDescription, Rows
from ..errors import NotNative
from .layer_calls import LayerCalls, outputs_of
from .observation import TOLERANCE, ModuleCall, difference, same

_NUM_TRIED = 64
_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.silu: torch.nn.functional.silu,
    Activation.gelu_tanh: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    Activation.gelu: torch.nn.functional.gelu,
    Activation.relu: torch.nn.functional.relu,
    Activation.relu_squared: lambda x: torch.nn.functional.relu(x).square(),
}


class MLP(NamedTuple):
    inputs: torch.Tensor
    """[tokens, hidden size] float32, as outputs."""
    outputs: torch.Tensor
    description: MLPDescription


class _Half(NamedTuple):
    """Outputs of a linear layer, [tokens, outputs] float32."""

    rows: Rows
    outputs: torch.Tensor


def recognise_mlp(calls: Sequence[ModuleCall], layer: LayerCalls) -> MLP:
    """calls: of the linear layers that are not those of attention. Raises NotNative."""
    if len(calls) not in (2, 3) or any(not same(call.input_rows, calls[0].input_rows) for call in calls[:-1]):
        raise NotNative(f"its MLP has {len(calls)} linear layers; needed: gate, up and down, or up and down")
    down = calls[-1]
    for gate, up in _ways(calls[:-1], down.input_rows.shape[1]):
        activated = up if gate is None else gate
        activation = _activation(activated.outputs, layer)
        if activation is None:
            continue
        product = _ACTIVATIONS[activation](activated.outputs) * (1 if gate is None else up.outputs)
        if difference(product, down.input_rows) <= TOLERANCE[layer.dtype]:
            gate_rows = None if gate is None else gate.rows
            description = MLPDescription(gate_rows, up.rows, outputs_of(down.module), activation)
            return MLP(calls[0].input_rows, down.output_rows, description)
    names = ", ".join(activation.name for activation in _ACTIVATIONS)
    raise NotNative(f"its MLP is none of up, activation, down, with or without a gate; known activations: {names}")


def _ways(calls: Sequence[ModuleCall], num_inputs: int) -> Iterator[tuple[_Half | None, _Half]]:
    """Gate and up."""
    whole = [_Half(outputs_of(call.module), call.output_rows) for call in calls]
    if len(whole) == 2:
        yield whole[0], whole[1]
        yield whole[1], whole[0]
    elif whole[0].outputs.shape[1] == num_inputs:
        yield None, whole[0]
    elif whole[0].outputs.shape[1] == 2 * num_inputs:
        parts = (slice(num_inputs), slice(num_inputs, None))
        left, right = (_Half(outputs_of(calls[0].module, part), calls[0].output_rows[:, part]) for part in parts)
        yield left, right
        yield right, left


def _activation(numbers: torch.Tensor, layer: LayerCalls) -> Activation | None:
    """Return the activation that a module with these inputs computes; None if there is no such module, or its function is
    unknown."""
    called = next(
        (call for call in layer.functions if call.inputs is not None and same(call.input_rows, numbers)), None
    )
    if called is None:
        return None
    tried = torch.linspace(-6, 6, _NUM_TRIED)
    with torch.inference_mode():
        result = called.module(tried)
    known = (kind for kind, function in _ACTIVATIONS.items() if torch.allclose(result, function(tried), atol=1e-6))
    return next(known, None)
