"""What Mamba's layers compute otherwise than transformers, so that a text does not depend on where it is cut.

The selective scan goes on from a state. transformers' function, and the kernel that replaces it on a GPU, begin with zeros whatever
the state is. But the scan is linear in its state: what an earlier state h adds to the output of token t is
C_t · exp(A · (Δ_0 + … + Δ_t)) · h, and to the state after the last token the same without C. So it is added afterwards.

Mamba-2's time step is clamped for all tokens. transformers clamps it where a layer gets several tokens at once, and not where it
gets a single one; here it is clamped in both places, as `generate` does without a cache.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F

_NAME = "mamba_selective_scan"
"""Name of the function in the modules of transformers that have such layers. find_mixers tries whether it is what it seems."""
_TOKENS = 64
"""Tokens for which the addition is computed at once: it takes a number for each token, channel and state."""


class ScanFromState:
    """A module's forward in which the scan goes on from given states. transformers' own stays as it is."""

    def __init__(self, module: torch.nn.Module, function: Any) -> None:
        """function: the module's forward, without what wraps it."""
        self._scan: Callable[..., Any] = function.__globals__[_NAME]
        self._states: list[torch.Tensor] = []
        self.forward: Callable[..., Any] = MethodType(with_global(function, _NAME, self._go_on), module)

    @classmethod
    def of(cls, module: torch.nn.Module) -> ScanFromState | None:
        """The scan of a module; None if its code does not have the function."""
        function = inspect.unwrap(type(module).forward)
        return cls(module, function) if callable(getattr(function, "__globals__", {}).get(_NAME)) else None

    @contextmanager
    def beginning(self, states: Sequence[torch.Tensor]) -> Iterator[None]:
        """The calls of `forward` inside go on from these states: [sequences, channels, state size], or the same for each head,
        [sequences, heads, channels, state size], for which the scan is called in turn."""
        self._states = [part for state in states for part in (state.unbind(1) if state.dim() == 4 else [state])]
        try:
            yield
        finally:
            self._states = []

    def _go_on(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The scan's arguments: hidden_states, dt and z [sequences, channels, tokens], A [channels, state size], B and C
        [sequences, state size, tokens], D and delta_bias [channels]."""
        state = self._states.pop(0).float()
        output, last = self._scan(
            hidden_states, dt, A, B, C, D, None, delta_bias, delta_softplus, return_last_state=True, **kwargs
        )
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype)[..., None]
        if delta_softplus:
            dt = F.softplus(dt)
        passed = dt.float().cumsum(-1)
        for first in range(0, dt.shape[-1], _TOKENS):
            piece = slice(first, first + _TOKENS)
            carried = torch.exp(A[:, None] * passed[:, :, piece, None]).mul_(state[:, :, None])
            output[:, :, piece] += torch.einsum("bctn,bnt->bct", carried, C[:, :, piece].float()).to(output.dtype)
        last = last + torch.exp(A * passed[:, :, -1:]) * state
        if z is not None:
            output = output * F.silu(z)
        return (output, last) if return_last_state else output


def with_global(function: Any, name: str, value: Any) -> FunctionType:
    """A copy of the function in which a global name has another value."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_UPDATE = "mamba2_selective_state_update"
"""Name of the function for a single token, in the modules of transformers that have such layers."""
_LIMIT = "time_step_limit"
"""Attribute of a layer with its least and its largest time step."""
_CLAMPS = "kvpool_clamps"


def clamp_time_steps(model: torch.nn.Module) -> None:
    """Let the model's layers clamp the time step of single tokens too. Idempotent."""
    for module in model.modules():
        least, most = getattr(module, _LIMIT, None) or (0.0, math.inf)
        function = inspect.unwrap(type(module).forward)
        update = getattr(function, "__globals__", {}).get(_UPDATE)
        if update is None or (least <= 0 and most == math.inf) or _CLAMPS in module.__dict__:
            continue
        module.__dict__[_CLAMPS] = True
        module.forward = MethodType(with_global(function, _UPDATE, _clamped(update, least, most)), module)


def _clamped(update: Callable[..., torch.Tensor], least: float, most: float) -> Callable[..., torch.Tensor]:
    def clamped(
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = F.softplus(dt)
        return update(state, hidden_states, torch.clamp(dt, least, most), A, B, C, D, **kwargs)

    return clamped
