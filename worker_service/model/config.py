"""A model's config: read by transformers, and what a worker takes from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from .errors import ModelError
from .rope import longest_exact


def read_config(folder: Path, gguf: str | None = None) -> Any:
    """The config in config.json, or in the head of a GGUF file of that name in the folder; no weights are read.

    Raises ModelError where transformers does not know such a model, or it brings its own code.
    """
    more = {} if gguf is None else {"gguf_file": gguf}
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **more)
    except (ValueError, OSError) as error:
        raise ModelError(
            f"transformers cannot read {folder / (gguf or 'config.json')}: {error}. Models that bring their own code are "
            "refused."
        ) from error


def choose_max_model_len(config: Any, wanted: int | None) -> int:
    """Tokens of the longest sequence: what is wanted, else what the config allows and the model computes exactly.

    Raises ModelError.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if wanted is None:
        if limit is None:
            raise ModelError(f"The config of {config.model_type} names no longest sequence: give --max-model-len.")
        return min(int(limit), longest_exact(config) or int(limit))
    if wanted < 2 or (limit is not None and wanted > limit):
        raise ModelError(f"--max-model-len {wanted} is not within 2 … {limit}, which the model's config allows.")
    return wanted
