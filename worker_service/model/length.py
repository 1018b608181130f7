"""The longest sequence of a model. No torch, no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import ModelError
from .rope import longest_exact

_LIMIT = "max_position_embeddings"
_N_POSITIONS = "n_positions"
_NAMED_N_POSITIONS = frozenset({"codegen", "gpt2", "gpt_bigcode", "gptj", "openai-gpt"})
"""Values of model_type whose config.json has the limit as n_positions."""
_SECTION_NAMES = frozenset({"decoder", "generator"})


def choose_max_model_len(config: Any, wanted: int | None) -> int:
    """Tokens of the longest sequence: `wanted`, else the config's limit, or less if longrope is not exact up to there.

    Raises ModelError.
    """
    limit = getattr(config.get_text_config(decoder=True), _LIMIT, None)
    if wanted is None:
        if limit is None:
            raise ModelError(f"The config of {config.model_type} has no longest sequence: give --max-model-len.")
        return min(int(limit), longest_exact(config) or int(limit))
    require_length(wanted, limit)
    return wanted


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
    stated = [part[name] for part in (config_json, *sections.values()) for name in names if name in part]
    if len(stated) != 1 or not names & text.keys():
        return None
    return stated[0] if type(stated[0]) is int else None
