"""Checks before a model is served over paged KV: of its config, its layers and its behaviour."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import structlog
import torch

from ...attention.interface import ATTENTION_NAME
from ..errors import UnsupportedModel
from ..forward.invariant import replacing
from ..forward.layers import AttentionLayer, find_attention_layers
from ..forward.mixer import Mixer
from ..forward.mixers import find_mixers
from ..forward.modules import ModulesRuntime
from ..language_model import find_class, is_composite
from ..length import choose_max_encoder_tokens, is_encoder_decoder, original_length, rope_sets
from .self_check import probe, probing
from .seq2seq_check import guarded_encoder_decoder
from .tiny_replica import THRESHOLD, build_replica, replica_config, replica_length, thresholds

_STATE_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Layers with a state of transformers' cache."""
_TYPES_WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "mlp", "moe"})
_KNOWN_LAYER_TYPES = _STATE_TYPES | _TYPES_WITHOUT_ATTENTION | {"full_attention", "sliding_attention"}
_SLIDING_TYPES = frozenset({"sliding_attention", "hybrid_sliding"})
# Its frequencies depend on the longest position in the packed row, so a long neighbour would change the K of all others, unless no
# text can be that long.
_ROPE_BY_LONGEST = "dynamic"

_log = structlog.get_logger("kvpool.model")


def check_config(config: Any, max_model_len: int) -> None:
    """Check the config, before weights are read. Raises UnsupportedModel."""
    kind = config.model_type
    text = config.get_text_config(decoder=True)
    is_causal = is_encoder_decoder(config) or getattr(text, "is_causal", True)
    # "vision": between the parts of an image only.
    if is_causal is False or getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModel(f"{kind} is configured for bidirectional attention; only causal models are served.")
    # Texts shorter than a chunk are not safe either: llama4 counts positions from the start of the packed row.
    if getattr(text, "attention_chunk_size", None):
        raise UnsupportedModel(
            f"{kind} attends in chunks of {text.attention_chunk_size} tokens, which only its mask implements; "
            "full and sliding-window attention are served."
        )
    others = set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    if others:
        raise UnsupportedModel(
            f"{kind} has layers of type {', '.join(sorted(others))}; "
            "only layers of full and sliding-window attention, and those with a state of transformers' cache, are served."
        )
    _check_dispatch(config)
    _check_rope(kind, text, max_model_len)


def _check_dispatch(config: Any) -> None:
    cls = find_class(config)
    if cls is None:
        kind = "sequence-to-sequence" if is_encoder_decoder(config) else "causal"
        raise UnsupportedModel(f"transformers has no {kind} language model for {config.model_type!r}.")
    # The class of a composite model need not attend itself; its layers are checked later.
    if not is_composite(config) and not cls._can_set_attn_implementation():
        raise UnsupportedModel(
            f"{cls.__name__} computes attention in its own code, not with transformers' AttentionInterface, "
            "so its KV cannot be paged."
        )


def _check_rope(kind: str, text: Any, max_model_len: int) -> None:
    for rope in rope_sets(text):
        if rope.get("rope_type") != _ROPE_BY_LONGEST:
            continue
        original = original_length(text, rope)
        if max_model_len > original:
            raise UnsupportedModel(
                f"{kind} uses {_ROPE_BY_LONGEST} RoPE, which changes all positions once one sequence is longer than "
                f"{original} tokens; give --max-model-len {original} or less (it is {max_model_len})."
            )


def check_replica(config: Any, max_model_len: int, max_encoder_tokens: int | None = None) -> None:
    """Check the behaviour of a tiny model with the same rules, before weights are read. Takes tenths of a second.

    It runs in float32, and its windows and other thresholds are within the lengths of the check. max_encoder_tokens: of its
    encoder's longest input, if it has one; None: the config's. Raises UnsupportedModel.
    """
    started = time.monotonic()
    try:
        _check_replica(config, max_model_len, max_encoder_tokens)
    except UnsupportedModel as error:
        length = _length_that_works(config, max_model_len, max_encoder_tokens)
        advice = f" Give --max-model-len {length} or less (it is {max_model_len})." if length else ""
        raise UnsupportedModel(
            f"{config.model_type} cannot be served, according to a tiny model of its kind: {error}{advice}"
        ) from error
    _log.debug("probed a tiny model of the same kind", seconds=round(time.monotonic() - started, 3))


def _check_replica(config: Any, max_model_len: int, max_encoder_tokens: int | None) -> None:
    cpu = torch.device("cpu")
    if is_encoder_decoder(config):  # thresholds are also those of the encoder
        max_model_len = max(max_model_len, max_encoder_tokens or choose_max_encoder_tokens(config, max_model_len))
    try:
        small = replica_config(config, max_model_len)
        replica = build_replica(small)
    except Exception as error:  # config classes raise all kinds of errors
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
            raise UnsupportedModel("it selects its attention from a table of its own.") from error
        raise UnsupportedModel(f"it cannot be built: {type(error).__name__}: {error}") from error
    length = replica_length(config, max_model_len)
    longest_input = choose_max_encoder_tokens(small, length) if is_encoder_decoder(config) else None
    guarded(replica, small, torch.float32, cpu, length, longest_input, is_thorough=True)


def _length_that_works(config: Any, max_model_len: int, max_encoder_tokens: int | None) -> int | None:
    """The largest max_model_len below a threshold with which the model passes; None if there is none."""
    for length in sorted((value for value in thresholds(config) if THRESHOLD < value < max_model_len), reverse=True):
        try:
            check_config(config, length)
            _check_replica(config, length, max_encoder_tokens)
        except UnsupportedModel:
            continue
        return length
    return None


def guarded(
    model: Any,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    max_encoder_tokens: int | None = None,
    *,
    is_thorough: bool = False,
) -> ModulesRuntime:
    """The runtime of a model that may be served. max_encoder_tokens: None: it has no encoder. is_thorough: try more texts, and the
    longest ones. Raises UnsupportedModel."""
    if max_encoder_tokens is not None:
        return guarded_encoder_decoder(model, config, dtype, device, max_model_len, max_encoder_tokens, is_thorough)
    with probing(model):
        with replacing(model, dtype, device):
            layers, mixers = find_attention_layers(model, device), find_mixers(model, device)
        runtime = ModulesRuntime(model.config, layers, dtype, device, mixers, model)
        check_layers(config, runtime.layers, max_model_len, runtime.mixers)
        probe(runtime, max_model_len, is_thorough)
    return runtime


def check_layers(
    config: Any, layers: Sequence[AttentionLayer], max_model_len: int, mixers: Sequence[Mixer] = ()
) -> None:
    """Check that every layer of the config was found, with the config's window. Raises UnsupportedModel."""
    text = config.get_text_config(decoder=True)
    kind = config.model_type
    # Layers that attend only to an image are skipped without one.
    absent = set(getattr(text, "cross_attention_layers", None) or ())
    types = getattr(text, "layer_types", None)
    _check_mixers(kind, types or (), mixers)
    expected = [
        index
        for index in range(text.num_hidden_layers)
        if index not in absent and (types is None or types[index] not in _TYPES_WITHOUT_ATTENTION)
    ]
    modules = list(dict.fromkeys(layer.module for layer in layers))
    window = getattr(text, "sliding_window", None)
    # If layers run several times, a config counts either modules or runs.
    is_each_seen = len(expected) in (len(modules), len(layers)) or (types is None and len(modules) > len(expected))
    if not is_each_seen:
        raise UnsupportedModel(
            f"{kind} has {len(expected)} layers that attend, but {len(modules)} modules reach attention through transformers' "
            "AttentionInterface; every layer must, in every forward pass."
        )
    for index, layer in enumerate(layers):
        if types is None:
            needed = window if window is not None and window < max_model_len else layer.needs.window
        else:
            position = index if len(layers) == len(expected) else modules.index(layer.module)
            needed = window if types[expected[position]] in _SLIDING_TYPES else None
        if (window_passed := layer.needs.window) != needed:
            raise UnsupportedModel(
                f"{kind}: {layer.name} should have the window {needed} by the config, but passes the window {window_passed} to "
                "attention; the window would be in the mask only."
            )


def _check_mixers(kind: str, types: Sequence[str], mixers: Sequence[Mixer]) -> None:
    """Raises UnsupportedModel unless every layer with a state keeps it in transformers' cache, where it can be replaced."""
    expected = {index for index, layer_type in enumerate(types) if layer_type in _STATE_TYPES}
    actual = {mixer.layer_idx for mixer in mixers}
    if expected - actual:
        raise UnsupportedModel(
            f"{kind} has {len(expected)} layers with a state, but {len(expected - actual)} of them do not keep it in transformers' "
            "cache; every layer must."
        )
