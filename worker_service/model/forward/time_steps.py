"""One time step for all tokens of Mamba-2's layers.

transformers clamps the time step where a layer gets several tokens at once, and not where it gets a single one. Then a text would
depend on where it is cut. So it is clamped in both places, as `generate` does without a cache.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

from .scan import with_global

_NAME = "mamba2_selective_state_update"
"""Name of the function for a single token, in the modules of transformers that have such layers."""
_LIMIT = "time_step_limit"
"""Attribute of a layer with its least and its largest time step."""
_CLAMPS = "kvpool_clamps"


def clamp_time_steps(model: torch.nn.Module) -> None:
    """Let the model's layers clamp the time step of single tokens too. Idempotent."""
    for module in model.modules():
        least, most = getattr(module, _LIMIT, None) or (0.0, math.inf)
        function = inspect.unwrap(type(module).forward)
        update = getattr(function, "__globals__", {}).get(_NAME)
        if update is None or (least <= 0 and most == math.inf) or _CLAMPS in module.__dict__:
            continue
        module.__dict__[_CLAMPS] = True
        module.forward = MethodType(with_global(function, _NAME, _clamped(update, least, most)), module)


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
