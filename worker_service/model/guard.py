"""What must hold of a model before it may be served over the paged KV: by its config, its layers and its behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from .errors import UnsupportedModel
from .layers import AttentionLayer

_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# These choose their frequencies by the longest position in the whole packed row, so a long neighbour would change
# everybody's K, unless no position can be that long.
_ROPE_BY_LONGEST = frozenset({"dynamic", "longrope"})


def check_config(config: Any, max_model_len: int) -> None:
    """Refuse by what the config says, before any weights are read. Raises UnsupportedModel."""
    kind = config.model_type
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind} is an encoder-decoder model; only decoder-only language models are served.")
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None):
        raise UnsupportedModel(f"{kind} is configured for bidirectional attention; only causal models are served.")
    if getattr(text, "attention_chunk_size", None):
        raise UnsupportedModel(
            f"{kind} attends in chunks of {text.attention_chunk_size} tokens, a rule that is in its mask only; "
            "full and sliding-window attention are served."
        )
    others = set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    if others:
        raise UnsupportedModel(
            f"{kind} has layers of type {', '.join(sorted(others))}, whose state is not KV per token; "
            "only models of full_attention and sliding_attention layers are served."
        )
    _check_dispatch(config)
    _check_rope(kind, text, max_model_len)


def _check_dispatch(config: Any) -> None:
    cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if cls is None:
        raise UnsupportedModel(f"transformers has no causal language model for {config.model_type!r}.")
    if not cls._can_set_attn_implementation():
        raise UnsupportedModel(
            f"{cls.__name__} computes attention in its own code and not through transformers' AttentionInterface, "
            "so its KV cannot be paged."
        )


def _check_rope(kind: str, text: Any, max_model_len: int) -> None:
    parameters = getattr(text, "rope_parameters", None) or {}
    sets = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    for rope in sets:
        if rope.get("rope_type") not in _ROPE_BY_LONGEST:
            continue
        original = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        if max_model_len > original:
            raise UnsupportedModel(
                f"{kind} uses {rope['rope_type']} RoPE, which changes all positions once one sequence is longer than "
                f"{original} tokens; give --max-model-len {original} or less (it is {max_model_len})."
            )


def check_layers(config: Any, layers: Sequence[AttentionLayer], max_model_len: int) -> None:
    """Refuse unless every layer of the config was seen, with the window that the config gives it."""
    text = config.get_text_config(decoder=True)
    kind, num_layers = config.model_type, text.num_hidden_layers
    if len(layers) != num_layers:
        raise UnsupportedModel(
            f"{kind} has {num_layers} layers, but {len(layers)} of them reach attention through transformers' "
            "AttentionInterface; all must, exactly once per forward pass."
        )
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    for index, layer in enumerate(layers):
        if types is not None and layer.window != (window if types[index] == "sliding_attention" else None):
            raise UnsupportedModel(
                f"{kind}: {layer.name} is a {types[index]} layer by the config, whose window is {window} tokens, but "
                f"gives attention the window {layer.window}; the window would be in the mask only."
            )
        if types is None and window is not None and window < max_model_len and layer.window != window:
            raise UnsupportedModel(
                f"{kind}: the config has a sliding window of {window} tokens, but {layer.name} gives attention the "
                f"window {layer.window}; give --max-model-len {window} or less, so that it plays no part."
            )
