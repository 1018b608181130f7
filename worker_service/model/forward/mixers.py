"""The recurrent layers of a model: gated delta nets, Mamba, short convolutions. Found by what they ask of transformers' cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import structlog
import torch
from torch.utils._pytree import tree_leaves
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...attention.interface import UnsupportedAttention
from ..errors import UnsupportedModel
from .layers import ForwardCall, bound, following, placeholder
from .mixer import Mixer, MixerCall, MixerForward, MixerPiece, MixerState, StateKind, has_tokens
from .scan import ScanFromState, clamp_time_steps

_log = structlog.get_logger("kvpool.model")

_WATCHED_TOKENS = 11
"""Tokens of the recorded pass: a number that no tensor has as its size for another reason."""
_CACHE_ARGUMENTS = ("past_key_values", "cache_params")
_FIRST, _MORE = 5, 3
"""Tokens of the two pieces by which a mixer's use of its state is tried."""
_MOST_DIFFERENCE = 0.1
"""Largest difference between the outputs of a token alone and as the first of several, as a share of the effect of the state.
Rounding is far below; a state that is not used makes it about 1."""


def find_mixers(model: Any, device: torch.device) -> list[Mixer]:
    """All modules that use states of the cache, in the order of the calls. On the meta device nothing is computed, so `forgets` and
    `scan` are left at their defaults.

    Runs a few tokens with attention left out. Raises UnsupportedModel.
    """
    layers = DynamicCache(config=model.config).layers
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        return []
    clamp_time_steps(model)
    cache = _WatchedCache(config=model.config)
    tokens = torch.arange(_WATCHED_TOKENS, device=device)[None]
    try:
        with bound(model.modules(), placeholder), following(model) as cache.running, torch.inference_mode():
            model(input_ids=tokens, position_ids=tokens, use_cache=False, **{_cache_argument(model): cache})
    except UnsupportedAttention as error:
        raise UnsupportedModel(f"{type(model).__name__} cannot be served: {error}.") from error
    except AttributeError as error:
        if error.obj is not cache:
            raise
        raise UnsupportedModel(f"{type(model).__name__} needs a cache of its own, with {error.name}.") from error
    names = {module: name for name, module in model.named_modules()}
    mixers = [_mixer(names[module], uses, cache) for module, uses in cache.uses.items()]
    _check_distinct(mixers)
    if device.type == "meta":
        return mixers
    with torch.inference_mode():
        return _with_ways(mixers, {mixer.module: cache.uses[mixer.module][0].call for mixer in mixers})


_TOLERANCE_OF_SCANS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Largest difference between several tokens at once and one by one, by the dtype of the convolution: the model's."""


class _Use(NamedTuple):
    """A module's use of a state."""

    call: ForwardCall
    kind: StateKind
    layer_idx: int
    state_idx: int


class _WatchedCache(DynamicCache):  # type: ignore[misc]
    """Notes which module asks for which state."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.running: list[ForwardCall] = []
        self.uses: dict[Any, list[_Use]] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self._note("conv", layer_idx, state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Any, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        self._note("conv", layer_idx, state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        self._note("recurrent", layer_idx, state_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        self._note("recurrent", layer_idx, state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def _note(self, kind: StateKind, layer_idx: int, state_idx: int) -> None:
        call = self.running[-1]
        self.uses.setdefault(call.module, []).append(_Use(call, kind, layer_idx, state_idx))


def _cache_argument(module: Any) -> str:
    parameters = inspect.signature(module.forward).parameters
    argument = next((name for name in _CACHE_ARGUMENTS if name in parameters), None)
    if argument is None:
        raise UnsupportedModel(f"{type(module).__name__} has a state, but no parameter for a cache.")
    return argument


def _mixer(name: str, uses: Sequence[_Use], cache: Cache) -> Mixer:
    first = uses[0]
    if any(use.call is not first.call or use.layer_idx != first.layer_idx for use in uses):
        raise UnsupportedModel(f"Its module {name} has the states of several layers, or runs several times.")
    layer = cache.layers[first.layer_idx]
    states: list[MixerState] = []
    for kind, index in dict.fromkeys((use.kind, use.state_idx) for use in uses):
        tensor = (layer.conv_states if kind == "conv" else layer.recurrent_states)[index]
        if tensor is not None:  # short convolutions have no recurrent state
            states.append(MixerState(kind, index, tuple(tensor.shape[1:]), tensor.dtype))
    module = first.call.module
    arguments = inspect.signature(module.forward).bind(*first.call.args, **first.call.kwargs).arguments
    by_token = {name for name, value in arguments.items() if has_tokens(value, _WATCHED_TOKENS)}
    return Mixer(
        name,
        module,
        first.layer_idx,
        len(layer.has_previous_state),
        tuple(states),
        _cache_argument(module),
        frozenset(by_token),
    )


def _check_distinct(mixers: Sequence[Mixer]) -> None:
    owners: dict[tuple[int, StateKind, int], str] = {}
    for mixer in mixers:
        for spec in mixer.states:
            other = owners.setdefault((mixer.layer_idx, spec.kind, spec.state_idx), mixer.name)
            if other != mixer.name:
                raise UnsupportedModel(f"Its modules {other} and {mixer.name} share a state.")


def _with_ways(mixers: Sequence[Mixer], recorded: dict[Any, ForwardCall]) -> list[Mixer]:
    """The mixers with the way in which each goes on from its state, tried once for each class."""
    forgetful: dict[type, bool] = {}
    scanning: dict[type, bool] = {}
    completed: list[Mixer] = []
    for mixer in mixers:
        kind, call = type(mixer.module), recorded[mixer.module]
        if kind not in forgetful:
            forgetful[kind] = _forgets(mixer, call)
        if forgetful[kind]:
            mixer = mixer._replace(forgets=True)
            scanning_mixer = mixer._replace(scan=ScanFromState.of(mixer.module))
            if kind not in scanning:
                scanning[kind] = scanning_mixer.scan is not None and _scans_as(scanning_mixer, mixer, call)
            mixer = scanning_mixer if scanning[kind] else mixer
        completed.append(mixer)
    return completed


def _scans_as(scanning: Mixer, serial: Mixer, recorded: ForwardCall) -> bool:
    """Whether several tokens at once have the same outputs, and leave the same states, as one by one, both from another state."""
    expected = _from_another_state(serial, recorded)
    try:
        scanned = _from_another_state(scanning, recorded)
    except Exception as error:  # a function of the same name may take and return anything
        _log.debug("a scan does not go on from a state", error=f"{type(error).__name__}: {error}")
        return False
    tolerance = _TOLERANCE_OF_SCANS[serial.states[0].dtype]
    return all(
        float((ours - theirs).norm()) <= tolerance * float(theirs.norm())
        for ours, theirs in zip(scanned, expected, strict=True)
    )


def _from_another_state(mixer: Mixer, recorded: ForwardCall) -> list[torch.Tensor]:
    """Output and states after several tokens."""
    call = MixerCall(mixer, MixerForward.of(mixer), recorded.args, recorded.kwargs)
    _, before = call.run(MixerPiece.of_one(0, _FIRST), None)
    output, states = call.run(MixerPiece.of_one(_FIRST, _WATCHED_TOKENS), [_changed(state) for state in before])
    return [_output(output), *(state.double() for state in states)]


def _changed(state: torch.Tensor) -> torch.Tensor:
    """Another state, with a large effect."""
    return state.roll(1, dims=1) + max(1.0, float(state.abs().max()))


def _forgets(mixer: Mixer, recorded: ForwardCall) -> bool:
    """Whether the mixer, given several tokens, does not use one of its states as it does with a single one.

    Its state is replaced by another one, so that the effect is large; then the next token alone must have the same output as when
    more tokens come after it.
    """
    call = MixerCall(mixer, MixerForward.of(mixer), recorded.args, recorded.kwargs)
    _, before = call.run(MixerPiece.of_one(0, _FIRST), None)
    alone, several = MixerPiece.of_one(_FIRST, _FIRST + 1), MixerPiece.of_one(_FIRST, _FIRST + _MORE)
    unchanged = _output(call.run(alone, _copies(before))[0])
    for number in range(len(before)):
        changed = _copies(before)
        changed[number] = _changed(changed[number])
        expected = _output(call.run(alone, _copies(changed))[0])
        first_of_several = _output(call.run(several, changed)[0])[:, :1]
        if float((first_of_several - expected).norm()) > _MOST_DIFFERENCE * float((expected - unchanged).norm()):
            return True
    return False


def _copies(states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [state.clone() for state in states]


def _output(output: Any) -> torch.Tensor:
    """All numbers of the first tensors of a mixer's output, [1, tokens, …]."""
    tensors = [leaf.flatten(2).double() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return torch.cat(tensors, dim=-1)
