"""Replacements for operations whose float32 bits depend on the number of rows.

On a CPU, torch computes some functions (sigmoid, silu, gelu, …) with other instructions for the last few numbers of a tensor, or of
a thread's share of it, and matrix products in an order that depends on the number of rows. Linear layers are packed
(packed_linear). Other functions and products of a module, such as those of experts, are replaced here: functions by compositions of
those that torch computes the same at every place (exp, tanh, erf, log1p, and all that are rounded exactly), products by products of
tiles of one size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .layers import ForwardCall, following

_TILE = 32
"""Rows of a product."""
_REPLACED = "kvpool_replaced"

Operation = Callable[..., torch.Tensor]


@contextmanager
def replacing(model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Run the model once within the context; afterwards, modules that called such operations call the replacements.

    Only for float32 on a CPU; otherwise without effect. Idempotent.
    """
    if dtype != torch.float32 or device.type != "cpu":
        yield
        return
    with following(model) as running:
        watch = _Watch(running)
        with watch:
            yield
    replacements = _Replacements()
    for module in watch.found:
        if _REPLACED not in module.__dict__:
            module.__dict__[_REPLACED] = True
            module.forward = replacements.around(module.forward)


class _Watch(TorchFunctionMode):
    """Records modules whose own forward, not that of a submodule, calls operations with a replacement."""

    def __init__(self, running: Sequence[ForwardCall]) -> None:
        super().__init__()
        self.found: list[Any] = []
        self._running = running

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OPERATIONS and self._running and self._running[-1].module not in self.found:
            self.found.append(self._running[-1].module)
        return func(*args, **(kwargs or {}))


class _Replacements(TorchFunctionMode):
    """Calls the replacements while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._entered = False

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The module's forward with the replacements, also for modules that it calls."""

        @functools.wraps(forward)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if self._entered:
                return forward(*args, **kwargs)
            self._entered = True
            try:
                with self:
                    return forward(*args, **kwargs)
            finally:
                self._entered = False

        return replaced

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = _OPERATIONS.get(func)
        if operation is None or not args or args[0].dtype != torch.float32:
            return func(*args, **(kwargs or {}))
        return operation(*args, **(kwargs or {}))


def sigmoid(inputs: torch.Tensor) -> torch.Tensor:
    return torch.exp(-inputs).add_(1).reciprocal_()


def silu(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return input / torch.exp(-input).add_(1)


def gelu(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if approximate == "none":
        cdf = torch.erf(input * math.sqrt(0.5))
    else:
        cdf = torch.tanh((input + input * input * input * 0.044715) * math.sqrt(2 / math.pi))
    return cdf.add_(1).mul_(input).mul_(0.5)


def softplus(input: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    scaled = input * beta
    return torch.where(scaled > threshold, input, torch.log1p(torch.exp(scaled)) / beta)


def mish(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return input * torch.tanh(softplus(input))


def elu(input: torch.Tensor, alpha: float = 1.0, inplace: bool = False) -> torch.Tensor:
    return torch.where(input > 0, input, torch.expm1(input) * alpha)


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product = matmul(input, weight.t())
    return product if bias is None else product + bias


def addmm(
    input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return matmul(mat1, mat2) * alpha + input * beta


def matmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Product of rows [..., K] with a weight [K, N]; torch computes other products, as of two activations."""
    if other.dim() != 2 or input.dim() < 2 or other.shape[0] == 1:  # a sum of one number has no order
        return torch.matmul(input, other)
    rows = input.reshape(-1, input.shape[-1])
    padding = -len(rows) % _TILE
    tiles = torch.split(F.pad(rows, (0, 0, 0, padding)), _TILE)
    product = torch.cat([torch.mm(tile, other) for tile in tiles])
    return product[: len(rows)].reshape(*input.shape[:-1], other.shape[1])


def grouped_mm(input: torch.Tensor, mat2: torch.Tensor, *, offs: torch.Tensor, **_: Any) -> torch.Tensor:
    """Rows [S, K], sorted by expert, times the experts' weights [E, K, N]; the rows of expert e end at offs[e]."""
    output = input.new_zeros(input.shape[0], mat2.shape[-1])
    first = 0
    for expert, end in enumerate(offs.tolist()):
        if end > first:
            output[first:end] = matmul(input[first:end], mat2[expert])
        first = end
    return output


def _operations() -> dict[Any, Operation]:
    products = [torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__]
    table: dict[Any, Operation] = dict.fromkeys(products, matmul)
    table |= {torch.sigmoid: sigmoid, torch.Tensor.sigmoid: sigmoid, torch.special.expit: sigmoid}
    table |= {F.silu: silu, F.gelu: gelu, F.softplus: softplus, F.mish: mish, F.elu: elu}
    table |= {F.linear: linear, torch.addmm: addmm}
    # The name in newer and in older versions of torch.
    for owner, name in ((F, "grouped_mm"), (torch, "_grouped_mm")):
        if hasattr(owner, name):
            table[getattr(owner, name)] = grouped_mm
    return table


_OPERATIONS = _operations()
