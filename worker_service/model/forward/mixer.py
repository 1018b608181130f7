"""One recurrent layer of a model, and calls of it for pieces of a packed row."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from .scan import ScanFromState

StateKind = Literal["conv", "recurrent"]


class MixerState(NamedTuple):
    """One tensor of a mixer's state."""

    kind: StateKind
    state_idx: int
    """The cache's `state_idx`."""
    shape: tuple[int, ...]
    """Shape for one sequence."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Mixer(NamedTuple):
    """A module with a state that each token changes."""

    name: str
    module: Any
    layer_idx: int
    """Index of the layer that it belongs to, as the module states it to the cache."""
    num_states: int
    """State indices that the cache has for the layer."""
    states: tuple[MixerState, ...]
    cache_argument: str
    """The parameter of its forward that takes the cache."""
    by_token: frozenset[str]
    """Parameters of its forward with tensors of [1, tokens, …]."""
    forgets: bool = False
    """Whether it does not go on from its state when it is given several tokens."""
    scan: ScanFromState | None = None
    """Lets a mixer that forgets go on from its state. None: it gets its tokens one by one after the first piece of a text."""

    @property
    def is_serial(self) -> bool:
        return self.forgets and self.scan is None


def state_bytes(mixers: Sequence[Mixer], dtype: torch.dtype | None = None) -> int:
    """Bytes of the states of one sequence in all mixers. dtype: the model's, if it differs from the one in which the mixers were
    found."""
    return sum(
        math.prod(spec.shape) * (spec.dtype if dtype is None or spec.dtype == torch.float32 else dtype).itemsize
        for mixer in mixers
        for spec in mixer.states
    )


def describe_mixers(mixers: Sequence[Mixer]) -> str:
    """One line for the log."""
    num_scans = sum(mixer.scan is not None for mixer in mixers)
    num_serial = sum(mixer.is_serial for mixer in mixers)
    line = f"recurrent layers: {len(mixers)}, with transformers' modules"
    if num_scans or num_serial:
        line += f"; {num_scans + num_serial} of them forget their state when they get several tokens"
        line += ": it is added afterwards" if not num_serial else f": {num_serial} get later chunks token by token"
    return line


class MixerPiece(NamedTuple):
    """Sequences of a packed row that are computed in one call, each with the same number of tokens."""

    rows: slice | torch.Tensor
    """Places in the packed row: a slice with those of one sequence, or [N] int64 with one of each of N sequences."""
    num_sequences: int
    num_tokens: int
    """Tokens of each sequence."""
    sources: torch.Tensor | None = None
    """[N] int64, blocks of the states to go on from; None: they begin."""

    @classmethod
    def of_one(cls, first: int, end: int, sources: torch.Tensor | None = None) -> Self:
        """A piece with the rows first … end − 1, all of one sequence."""
        return cls(slice(first, end), 1, end - first, sources)


def has_tokens(value: Any, num_tokens: int) -> bool:
    """Whether an argument is, or contains, a tensor [1, num_tokens, …]."""
    if isinstance(value, torch.Tensor):
        return value.dim() >= 2 and value.shape[:2] == (1, num_tokens)
    if isinstance(value, dict):
        return any(has_tokens(entry, num_tokens) for entry in value.values())
    return isinstance(value, list | tuple) and any(has_tokens(entry, num_tokens) for entry in value)


class MixerForward(NamedTuple):
    """The module's own forward of a mixer."""

    run: Callable[..., Any]
    signature: inspect.Signature
    """Kept here because finding it takes longer than using it."""

    @classmethod
    def of(cls, mixer: Mixer) -> Self:
        """Capture the module's forward and its signature as they are now."""
        return cls(mixer.module.forward, inspect.signature(mixer.module.forward))


class MixerCall:
    """A call of a mixer with a packed row, made piece by piece."""

    def __init__(self, mixer: Mixer, forward: MixerForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._mixer = mixer
        self._forward = forward
        self._arguments = forward.signature.bind(*args, **kwargs).arguments
        first = next(iter(self._arguments.values()))
        self._num_tokens, self._device = first.shape[1], first.device

    def run(self, piece: MixerPiece, before: Sequence[torch.Tensor] | None) -> tuple[Any, list[torch.Tensor]]:
        """The output for the piece, tensors [sequences, tokens, …], and the states after it, [sequences, …] each.

        before: the states to go on from; they may be changed. None: the state that the layer begins with.
        """
        cache = self._cache(piece, before)
        if before is None or not self._mixer.forgets or piece.num_tokens == 1:
            output = self._call(piece.rows, cache, self._forward.run)
        elif self._mixer.scan is not None:
            specs = zip(self._mixer.states, before, strict=True)
            with self._mixer.scan.beginning([state for spec, state in specs if spec.kind == "recurrent"]):
                output = self._call(piece.rows, cache, self._mixer.scan.forward)
        else:
            assert isinstance(piece.rows, slice)
            rows = range(piece.rows.start, piece.rows.stop)
            outputs = [self._call(slice(row, row + 1), cache, self._forward.run) for row in rows]
            output = join(outputs, lambda tensors: torch.cat(tensors, dim=1))
        return output, self._states(cache)

    def _call(self, rows: slice | torch.Tensor, cache: Cache, forward: Callable[..., Any]) -> Any:
        def of_rows(value: Any) -> Any:
            if not has_tokens(value, self._num_tokens):
                return value
            return value[:, rows] if isinstance(rows, slice) else value[0].index_select(0, rows)[:, None]

        arguments = {
            name: tree_map(of_rows, value) if name in self._mixer.by_token else value
            for name, value in self._arguments.items()
        }
        arguments[self._mixer.cache_argument] = cache
        bound = inspect.BoundArguments(self._forward.signature, arguments)
        return forward(*bound.args, **bound.kwargs)

    def _cache(self, piece: MixerPiece, states: Sequence[torch.Tensor] | None) -> Cache:
        """A cache that the mixer changes in place. transformers would make the tensors later, and mark them for compilers."""
        layer = LinearAttentionLayer(number_of_states=self._mixer.num_states)
        layer.device = self._device
        for number, spec in enumerate(self._mixer.states):
            if states is None:
                tensor = torch.zeros(piece.num_sequences, *spec.shape, dtype=spec.dtype, device=self._device)
            else:
                tensor = states[number]
                layer.has_previous_state[spec.state_idx] = True
            if spec.kind == "conv":
                layer.dtype = spec.dtype
                layer.conv_states[spec.state_idx] = tensor
                layer.is_conv_states_initialized[spec.state_idx] = True
                layer.conv_kernel_size[spec.state_idx] = spec.shape[-1]
            else:
                layer.recurrent_states[spec.state_idx] = tensor
                layer.is_recurrent_states_initialized[spec.state_idx] = True
        return Cache(layers=[layer] * (self._mixer.layer_idx + 1))

    def _states(self, cache: Cache) -> list[torch.Tensor]:
        layer = cache.layers[self._mixer.layer_idx]
        return [
            (layer.conv_states if spec.kind == "conv" else layer.recurrent_states)[spec.state_idx]
            for spec in self._mixer.states
        ]


def join(outputs: Sequence[Any], how: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """Join outputs of the same structure into one; what is no tensor is taken from the first."""
    flat = [tree_flatten(output) for output in outputs]
    leaves = [
        how(list(of_all)) if isinstance(of_all[0], torch.Tensor) else of_all[0]
        for of_all in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return tree_unflatten(leaves, flat[0][1])
