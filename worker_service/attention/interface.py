"""The function that transformers calls instead of its own attention, and the binding of modules to it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from .layer import AttentionCall, AttentionTarget

ATTENTION_NAME = "kvpool"
_TARGET = "kvpool_target"

# Arguments that a model may pass without effect, with the accepted values.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "dropout": (0, None),
    "is_causal": (True, None),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
    "output_router_logits": (False, None),
    "use_cache": (False, None),
    "return_dict": (True, False, None),
}
# Positions are in q and k already; logits_to_keep concerns the output head.
_IGNORED = frozenset({"position_ids", "logits_to_keep"})


class UnsupportedAttention(RuntimeError):
    """A model needs a kind of attention that is not supported."""


def register() -> None:
    """Register `attn_implementation="kvpool"` with transformers. Idempotent.

    Deliberately without a mask function: transformers then builds no mask and passes attention_mask=None.
    """
    AttentionInterface.register(ATTENTION_NAME, attention_forward)


def bind(module: torch.nn.Module, target: AttentionTarget) -> None:
    """Route the module's attention calls to the target."""
    # Directly into __dict__: a plain attribute, not a submodule, and faster than torch's __getattr__.
    module.__dict__[_TARGET] = target


def unbind(module: torch.nn.Module) -> None:
    """Undo bind; no error if the module is not bound."""
    module.__dict__.pop(_TARGET, None)


def target_of(module: torch.nn.Module) -> AttentionTarget | None:
    """The target that the module is bound to; None if it is not bound."""
    target: AttentionTarget | None = module.__dict__.get(_TARGET)
    return target


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One attention call of one module, passed to its target; see AttentionTarget for shapes."""
    if attention_mask is not None:
        raise UnsupportedAttention(f"{type(module).__name__} passes an attention mask; only causal attention is known")
    for name, value_given in kwargs.items():
        if value_given is not None:
            _refuse_unknown(module, name, value_given)
    target = module.__dict__.get(_TARGET)
    if target is None:
        raise UnsupportedAttention(f"{type(module).__name__} reaches attention but was not bound at load")
    call = AttentionCall(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        bias=position_bias,
    )
    return target(module, query, key, value, call), None


def _refuse_unknown(module: torch.nn.Module, name: str, value: Any) -> None:
    if name in _IGNORED:
        return
    if name in _HARMLESS and not isinstance(value, torch.Tensor) and value in _HARMLESS[name]:
        return
    shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
    raise UnsupportedAttention(f"{type(module).__name__} passes {name}={shown} to attention, which is not supported")
