"""One forward pass, recorded: inputs and outputs of every module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from transformers.pytorch_utils import Conv1D

from ...attention.layer import AttentionCall
from ..forward.layers import AttentionLayer, bound, placeholder
from ..guard.self_check import random_sequences

_NUM_TOKENS = 11
"""A prime, which few numbers of heads are."""
_NUM_LARGE = 5
_LARGE = 64.0
"""Outputs of linear layers for the last _NUM_LARGE tokens are multiplied by this, so that a clamp has an effect."""
_ROUNDING = 2.0**-8
"""The relative rounding error of bfloat16. That of cos and sin is the same in all heads, so over the tokens of one pass it does
not average out."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""The largest difference between numbers computed in two ways that counts as equal, as a share of the token's largest number."""


class ModuleCall(NamedTuple):
    """A module's call. Tensors are copies in float32."""

    module: torch.nn.Module
    inputs: torch.Tensor | None
    """The first tensor, in its own shape."""
    outputs: tuple[torch.Tensor, ...]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def input_rows(self) -> torch.Tensor:
        """[tokens, numbers]"""
        assert self.inputs is not None
        return rows(self.inputs)

    @property
    def output_rows(self) -> torch.Tensor:
        """[tokens, numbers]"""
        return rows(self.outputs[0])


class ObservedAttention(NamedTuple):
    """An attention call, in float32."""

    query: torch.Tensor
    """[tokens, heads · head size], as key and value; after rotation."""
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor


class Observation(NamedTuple):
    """A forward pass of a few tokens, at positions from the first to the last possible one."""

    ids: torch.Tensor
    positions: torch.Tensor
    """[tokens]"""
    calls: Sequence[ModuleCall]
    """The calls of modules without children and of the decoder's layers, in order."""
    attended: dict[torch.nn.Module, ObservedAttention]

    def of(self, modules: Iterable[torch.nn.Module]) -> list[ModuleCall]:
        wanted = set(modules)
        return [call for call in self.calls if call.module in wanted]


def observe(
    model: Any, layers: Sequence[AttentionLayer], decoder_layers: Sequence[torch.nn.Module], max_model_len: int
) -> Observation:
    """Run the model once. Attention gives placeholders, so each token is computed by itself."""
    (tokens,) = random_sequences(model.config, [_NUM_TOKENS])
    positions = torch.linspace(0, max_model_len - 1, _NUM_TOKENS).long()
    recorder = _Recorder(model.get_output_embeddings())
    recorded = {module for module in model.modules() if next(module.children(), None) is None} | set(decoder_layers)
    hooks = [module.register_forward_hook(recorder.record, with_kwargs=True) for module in recorded]
    try:
        with bound([layer.module for layer in layers], recorder), torch.inference_mode():
            model(input_ids=torch.tensor([tokens]), position_ids=positions[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return Observation(torch.tensor(tokens), positions, recorder.calls, recorder.attended)


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """[tokens, numbers] of a tensor with tokens in one of its first three dimensions: [tokens, …], [1, tokens, …], [1, heads,
    tokens, …]."""
    if len(tensor) != _NUM_TOKENS and tensor.dim() > 2:
        tensor = tensor[0]
    if len(tensor) != _NUM_TOKENS and tensor.dim() > 2:
        tensor = tensor.transpose(0, 1)
    return tensor.reshape(len(tensor), -1)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether they are the same numbers, as those that are passed on unchanged."""
    return left.shape == right.shape and torch.equal(left, right)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference in any token, as a share of its largest number; both [tokens, numbers]."""
    return float(((ours - theirs).abs().amax(-1) / theirs.abs().amax(-1).clamp(min=1e-30)).max())


def factor(of: torch.Tensor, wanted: torch.Tensor, known: Sequence[float] = ()) -> float:
    """The number with which `of` comes closest to `wanted`; the nearest known one if it is that up to rounding.

    Both [tokens, numbers]. Tokens count alike, for in bfloat16 large numbers have large errors.
    """
    size = wanted.double().norm(dim=-1, keepdim=True).clamp(min=1e-30)
    left, right = of.double() / size, wanted.double() / size
    found = float((left * right).sum() / left.square().sum().clamp(min=1e-30))
    nearest = min(known, key=lambda value: abs(value - found), default=found)
    return nearest if abs(nearest - found) < _ROUNDING * abs(found) else found


def is_linear(module: torch.nn.Module) -> bool:
    return type(module) in (torch.nn.Linear, Conv1D)


class _Recorder:
    """Records calls. An AttentionTarget."""

    def __init__(self, head: torch.nn.Module) -> None:
        self._head = head
        self.calls: list[ModuleCall] = []
        self.attended: dict[torch.nn.Module, ObservedAttention] = {}

    def record(self, module: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        if is_linear(module) and module is not self._head and output.shape[-2] == _NUM_TOKENS:
            output = output.clone()
            output[..., -_NUM_LARGE:, :] *= _LARGE
        first = next((value for value in (*arguments, *keywords.values()) if _is_float(value)), None)
        all_outputs = output if isinstance(output, tuple) else (output,)
        self.calls.append(
            ModuleCall(
                module,
                None if first is None else _copy(first),
                tuple(_copy(value) for value in all_outputs if _is_float(value)),
                arguments,
                keywords,
            )
        )
        return output

    def __call__(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        output = placeholder(module, query, key, value, call)
        self.attended[module] = ObservedAttention(*(rows(_copy(one)) for one in (query, key, value, output)))
        return output


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float32, copy=True)
