"""RoPE that changes with the length of the text: what is fixed at load, so that no text of a packed row changes another's."""

from __future__ import annotations

from typing import Any, Literal

Regime = Literal["short", "long"]


def rope_sets(text: Any) -> list[dict[str, Any]]:
    """The RoPE parameters of a text config: none, one set for all layers, or one per layer type."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]


def original_length(text: Any, rope: dict[str, Any]) -> int:
    """The number of tokens up to which RoPE is as it was trained at first."""
    original = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    return int(original or text.max_position_embeddings)


def fix_longrope(config: Any, max_model_len: int) -> Regime | None:
    """Let longrope use one of its two lists of factors for every text, by changing the config in place.

    transformers takes the long list once the largest position of a row reaches the original length, for all
    texts of the row, and the K that the cache holds of them no longer fit. So the choice is made once, as vLLM makes it: the
    long list if texts may become that long, else the short one. It shapes all KV, hence belongs to the fingerprint. Only the
    short one gives what `generate` gives for every text served, so it is the default (`choose_max_model_len`).
    None: the model has no longrope.
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
    """The longest text, in tokens, that longrope computes as transformers computes it alone, whatever its length below that.

    A text that is longer from its prompt on is exact too, but only under the factors for long texts, which then serve all.
    None: the model has no longrope.
    """
    text = config.get_text_config(decoder=True)
    lengths = [original_length(text, rope) for rope in rope_sets(text) if rope.get("rope_type") == "longrope"]
    return min(lengths, default=None)


def describe_regime(config: Any, regime: Regime | None) -> str | None:
    """A line for people about what longrope computes; None for a model without it."""
    original = longest_exact(config)
    if regime is None or original is None:
        return None
    if regime == "short":
        return (
            f"longrope: texts of at most {original} tokens, computed as transformers computes them; a larger --max-model-len "
            "allows longer ones, and then computes all texts with the factors for long ones"
        )
    return (
        f"longrope: texts may be longer than {original} tokens, so the factors for long texts serve all of them; shorter texts "
        f"differ from what transformers generates; --max-model-len {original}, the default, takes the factors for short texts"
    )
