"""Which modules are running, while a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class ForwardCall(NamedTuple):
    """A call of a module's forward."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def following(model: torch.nn.Module) -> Iterator[list[ForwardCall]]:
    """The calls that are running, the innermost last. The hooks are gone afterwards, also after an error."""
    running: list[ForwardCall] = []

    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(ForwardCall(module, args, kwargs))

    def leave(*_: Any) -> None:
        running.pop()

    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()
