"""The longest sequence of a model, and RoPE that depends on the length of the text: fixed at load, so that texts in a packed row do
not affect each other. No torch, no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from .errors import ModelError

Regime = Literal["short", "long"]


def rope_sets(text: Any) -> list[dict[str, Any]]:
    """The RoPE parameters of a text config: none, one set for all layers, or one per layer type."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]


def original_length(text: Any, rope: dict[str, Any]) -> int:
    """The length in tokens of the original training, up to which RoPE is unscaled."""
    original = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    return int(original or text.max_position_embeddings)


def fix_longrope(config: Any, max_model_len: int) -> Regime | None:
    """Change the config in place so that longrope uses one of its two lists of factors for every text.

    transformers uses the long list for all texts of a row once the largest position reaches the original length, and then cached K
    no longer match. So the choice is made once, as in vLLM: the long list if texts may become that long, else the short one. It
    affects all KV, hence belongs to the fingerprint. Only the short one equals `generate` for every text, so it is the default
    (`choose_max_model_len`). None: the model has no longrope.
    """
    text = config.get_text_config(decoder=True)
    regime: Regime | None = None
    for rope in rope_sets(text):
        if rope.get("rope_type") != "longrope":
            continue
        if max_model_len > original_length(text, rope):
            rope["short_factor"] = rope["long_factor"]
            regime = "long"
        else:
            regime = regime or "short"
    return regime


def longest_exact(config: Any) -> int | None:
    """The length in tokens up to which longrope with short factors equals transformers for every text.

    A text whose prompt is longer is exact too, but only with the factors for long texts, which then apply to all. None: the model
    has no longrope.
    """
    text = config.get_text_config(decoder=True)
    lengths = [original_length(text, rope) for rope in rope_sets(text) if rope.get("rope_type") == "longrope"]
    return min(lengths, default=None)


def describe_regime(config: Any, regime: Regime | None) -> str | None:
    """A line for the log about the choice; None for a model without longrope."""
    original = longest_exact(config)
    if regime is None or original is None:
        return None
    if regime == "short":
        return (
            f"longrope: texts of at most {original} tokens, equal to those of transformers; a larger --max-model-len allows "
            "longer ones, with the factors for long texts for all"
        )
    return (
        f"longrope: texts may be longer than {original} tokens, so the factors for long texts apply to all; shorter texts "
        f"differ from those of transformers; --max-model-len {original}, the default, uses the factors for short texts"
    )


_LIMIT = "max_position_embeddings"
_N_POSITIONS = "n_positions"
_NAMED_N_POSITIONS = frozenset({"codegen", "gpt2", "gpt_bigcode", "gptj", "openai-gpt"})
"""Values of model_type whose config.json has the limit as n_positions."""
_USUAL_LENGTH = 512
"""Tokens of the longest text of an encoder-decoder model without a limit, as T5 was trained with."""
_SECTION_NAMES = frozenset({"decoder", "generator"})


def choose_max_model_len(config: Any, wanted: int | None) -> int:
    """Tokens of the longest sequence: `wanted`, else the config's limit, or less if longrope is not exact up to there.

    Raises ModelError.
    """
    limit = getattr(config.get_text_config(decoder=True), _LIMIT, None)
    if wanted is None:
        if limit is None and is_encoder_decoder(config):
            return _usual_length(config)
        if limit is None:
            raise ModelError(f"The config of {config.model_type} has no longest sequence: give --max-model-len.")
        return min(int(limit), longest_exact(config) or int(limit))
    require_length(wanted, limit)
    return wanted


def choose_max_encoder_tokens(config: Any, max_model_len: int, wanted: int | None = None) -> int:
    """Tokens of the longest input of an encoder: `wanted`, else the config's limit. An encoder without a limit gets inputs as
    long as the longest text of the decoder, and as the model was trained with.

    Raises ModelError.
    """
    limit = getattr(encoder_config(config), _LIMIT, None)
    if wanted is None:
        return max(max_model_len, _usual_length(config)) if limit is None else int(limit)
    if wanted < 1 or (limit is not None and wanted > limit):
        raise ModelError(f"--max-encoder-tokens {wanted} is not within 1 … {limit}, the limits of the model's config.")
    return wanted


def is_encoder_decoder(config: Any) -> bool:
    """Whether a prompt feeds an encoder, to whose output the decoder attends."""
    return bool(getattr(config, "is_encoder_decoder", False))


def encoder_config(config: Any) -> Any:
    """The part of an encoder-decoder model's config that describes its encoder; of most models the config itself."""
    part = getattr(config, "encoder", None)
    return part if hasattr(part, "to_dict") else config


def _usual_length(config: Any) -> int:
    """The length that the model was trained with, if its config states it, else _USUAL_LENGTH: for models whose positions are
    distances, which bound nothing."""
    trained = getattr(config, _N_POSITIONS, None)
    return trained if isinstance(trained, int) and trained > 1 else _USUAL_LENGTH


def require_length(wanted: int, limit: int | None) -> None:
    """Raises ModelError if `wanted` is not within 2 … `limit`, tokens; None: the config has no limit."""
    if wanted < 2 or (limit is not None and wanted > limit):
        raise ModelError(f"--max-model-len {wanted} is not within 2 … {limit}, the limits of the model's config.")


def plain_limit(config_json: Mapping[str, Any]) -> int | None:
    """The limit of `choose_max_model_len` by the content of config.json alone.

    None unless the file states one limit, for the text: transformers knows more names and defaults, but takes seconds to import.
    """
    sections = {
        name: value
        for name, value in config_json.items()
        if isinstance(value, dict) and (name in _SECTION_NAMES or name.endswith("_config"))
    }
    text = config_json
    if sections:
        # With text_config, others are of images or sound; without it, one of them, or a default of the class, is the text's.
        if "text_config" not in sections or _SECTION_NAMES & sections.keys():
            return None
        text = sections["text_config"]
    names = {_LIMIT, _N_POSITIONS} if text.get("model_type") in _NAMED_N_POSITIONS else {_LIMIT}
    limits = [part[name] for part in (config_json, *sections.values()) for name in names if name in part]
    if len(limits) != 1 or not names & text.keys():
        return None
    return limits[0] if type(limits[0]) is int else None
