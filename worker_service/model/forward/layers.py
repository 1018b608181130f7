"""The attention layers of a model, found by recording a forward pass, their groups, and their targets in service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...attention.interface import UnsupportedAttention, bind, target_of, unbind
from ...attention.layer import AttentionBackend, AttentionCall, AttentionTarget, KVLayer, LayerNeeds
from ..errors import UnsupportedModel

_SMALLEST_WINDOW = 2
"""Tokens of the smallest window that the manager takes."""
_WATCHED_TOKENS = 3


class AttentionLayer(NamedTuple):
    """One attention call of the model's forward pass. A module that attends several times has several layers."""

    name: str
    module: torch.nn.Module
    needs: LayerNeeds
    call: AttentionCall = AttentionCall(scaling=1.0)
    """The recorded arguments."""
    source: int | None = None
    """Index of the layer whose K and V it reads; it stores none. None: it has its own."""
    distance_bias: torch.Tensor | None = None
    """See KVLayer."""


def find_attention_layers(model: Any, device: torch.device) -> list[AttentionLayer]:
    """All modules that call attention_forward in a forward pass, in the order of calls. Raises UnsupportedModel."""
    tokens = torch.arange(_WATCHED_TOKENS, device=device)[None]
    return record_layers(model, lambda: model(input_ids=tokens, position_ids=tokens, use_cache=False), _WATCHED_TOKENS)


def record_layers(
    model: Any, run: Callable[[], object], num_tokens: int, num_states: int | None = None
) -> list[AttentionLayer]:
    """All modules that call attention_forward in `run`, a forward pass over num_tokens tokens, in the order of calls. num_states:
    length of the encoder's output, another one; None: there is no encoder. Raises UnsupportedModel."""
    names = {module: name for name, module in model.named_modules()}
    recorder = _Recorder(names, num_tokens, num_states)
    try:
        with bound(names, recorder), torch.inference_mode():
            run()
    except UnsupportedAttention as error:
        raise UnsupportedModel(f"{type(model).__name__} cannot be served: {error}.") from error
    for layer in recorder.found:
        window = layer.needs.window
        if window is not None and window < _SMALLEST_WINDOW:
            raise UnsupportedModel(
                f"{layer.name} has a sliding window of {window} tokens; needed: {_SMALLEST_WINDOW} or more, since a token "
                "that sees no other has no KV to cache. Correct sliding_window in config.json."
            )
    if len({layer.module for layer in recorder.found}) < len(recorder.found):
        model.register_forward_pre_hook(_restart_turns)
    return recorder.found


def _restart_turns(model: torch.nn.Module, _: Any) -> None:
    """Restart the turns before every forward pass, because the one before may have failed."""
    for module in model.modules():
        target = target_of(module)
        if isinstance(target, _Turns):
            target.restart()


def placeholder(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> torch.Tensor:
    """An AttentionTarget that leaves attention out, for what only needs the shapes: the result depends on all queries."""
    if query.shape[2] != value.shape[2]:  # cross attention
        return query.mean(-1, keepdim=True).expand(-1, -1, -1, value.shape[3]).transpose(1, 2).contiguous()
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()


@contextmanager
def bound(modules: Iterable[torch.nn.Module], target: AttentionTarget) -> Iterator[None]:
    """Bind all these modules to the target inside; afterwards they are bound to none."""
    modules = list(modules)
    for module in modules:
        bind(module, target)
    try:
        yield
    finally:
        for module in modules:
            unbind(module)


class _Recorder:
    """An AttentionTarget that records calls and returns placeholders."""

    def __init__(self, names: dict[torch.nn.Module, str], num_tokens: int, num_states: int | None) -> None:
        self._names, self._num_tokens, self._num_states = names, num_tokens, num_states
        self.found: list[AttentionLayer] = []
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        """K and V of each call. They are kept so that no other tensors get their memory."""

    def __call__(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        name = self._names[module]
        num_keys = key.shape[2]
        is_cross = num_keys == self._num_states
        if query.shape[2] != self._num_tokens or query.shape[0] != 1 or not (is_cross or num_keys == self._num_tokens):
            raise UnsupportedAttention(f"its module {name} does not attend to every token of the row from every token")
        bias = call.bias
        if bias is not None and self._num_states is None:
            raise UnsupportedAttention(
                f"{type(module).__name__} passes position_bias=a tensor to attention, which is not supported"
            )
        if bias is not None and is_cross and not bias.is_meta and bool(bias.any()):
            raise UnsupportedAttention(f"its module {name} adds a bias to scores of the encoder's output")
        needs = LayerNeeds(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            k_head_dim=key.shape[3],
            v_head_dim=value.shape[3],
            scaling=call.scaling,
            window=call.window,
            softcap=call.softcap,
            has_sinks=call.sinks is not None,
            is_cross=is_cross,
            has_bias=bias is not None and not is_cross,
        )
        same = (index for index, (k, v) in enumerate(self._seen) if _is_same(k, key) and _is_same(v, value))
        self.found.append(AttentionLayer(name, module, needs, call._replace(bias=None), next(same, None)))
        self._seen.append((key, value))
        return placeholder(module, query, key, value, call)


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether both are the same numbers in the same memory. Also on the meta device, where memory has no address."""
    return left is right or (
        left.untyped_storage()._cdata == right.untyped_storage()._cdata
        and left.storage_offset() == right.storage_offset()
        and left.shape == right.shape
        and left.stride() == right.stride()
    )


@dataclass(frozen=True, slots=True, eq=False)
class PagedTarget:
    """The AttentionTarget in service."""

    layer: KVLayer
    backend: AttentionBackend

    def __call__(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        if call.window != self.layer.window:
            raise UnsupportedAttention(f"window {call.window} differs from {self.layer.window} seen while loading")
        if call.bias is not None and self.layer.distance_bias is None and not self.layer.is_cross:
            raise UnsupportedAttention("its scores have a bias that was not seen while loading")
        return self.backend.attend(self.layer, query, key, value, call)


class _Turns:
    """The targets of a module that attends several times in a forward pass, one per call."""

    def __init__(self, targets: Sequence[PagedTarget]) -> None:
        self._targets = targets
        self._turn = 0

    def restart(self) -> None:
        self._turn = 0

    def __call__(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        if self._turn == len(self._targets):
            raise UnsupportedAttention(f"attends more often than the {self._turn} times seen while loading")
        target = self._targets[self._turn]
        self._turn += 1
        return target(module, query, key, value, call)


def bind_layers(layers: Sequence[AttentionLayer], kv_layers: Sequence[KVLayer], backend: AttentionBackend) -> None:
    """Bind every attention module to its KV and the backend; replaces earlier bindings."""
    targets: dict[torch.nn.Module, list[PagedTarget]] = {}
    for layer, kv_layer in zip(layers, kv_layers, strict=True):
        targets.setdefault(layer.module, []).append(PagedTarget(kv_layer, backend))
    for module, own in targets.items():
        bind(module, own[0] if len(own) == 1 else _Turns(own))


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


def sights(layers: Sequence[AttentionLayer]) -> list[int | None]:
    """The window of each layer's KV in tokens: the widest window of the layers that read it; None: one of them sees everything. A
    layer that reads another one's KV gets the window of that KV."""
    widest: dict[int, int | None] = {}
    for index, layer in enumerate(layers):
        stored = index if layer.source is None else layer.source
        current = widest.get(stored, 0)
        widest[stored] = None if current is None or layer.needs.window is None else max(current, layer.needs.window)
    return [widest[index if layer.source is None else layer.source] for index, layer in enumerate(layers)]


def groups_of(layers: Sequence[AttentionLayer]) -> dict[int | None, list[int]]:
    """The groups of a model by their window, with the indices of their layers: full attention, None, first, if there is any, then
    one for each window, from the largest to the smallest.

    Layers that read the KV of another one store nothing, and are in no group; those of cross attention are in one of their own,
    after all others.
    """
    windows = sights(layers)
    groups: dict[int | None, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.source is None and not layer.needs.is_cross:
            groups.setdefault(windows[index], []).append(index)
    return dict(sorted(groups.items(), key=lambda group: (group[0] is not None, -(group[0] or 0))))
