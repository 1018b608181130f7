"""RoPE that depends on the length of the text: fixed at load, so that texts in a packed row do not affect each other."""

from __future__ import annotations

from typing import Any, Literal

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
