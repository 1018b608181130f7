"""A hash of everything that determines a model's KV, so that KV of different models never mixes."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from ..length import Regime
from ..progress import Progress
from ..settings import QuantizationName
from .cache_dir import file_digest
from .files import stored_weights

# Fields of config.json that do not affect what the model computes.
_NO_PART_IN_KV = frozenset(
    {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"}
    | {"bos_token_id", "eos_token_id", "_attn_implementation"}
)
_PADDING = "pad_token_id"
_POSITIONS_BY_PADDING = "create_position_ids_from_input_ids"
"""Name in transformers of the function of models that count positions from the id of padding on, such as RoBERTa."""


def fingerprint(
    folder: Path,
    dtype: str,
    cache_dir: Path,
    progress: Progress,
    rope_regime: Regime | None = None,
    quantize: QuantizationName = "none",
) -> str:
    """Hex SHA-256 of the weights files, and of all else that the KV depends on: config fields that affect the computation, the
    dtype, the RoPE regime, and how weights are quantized."""
    config = json.loads((folder / "config.json").read_bytes())
    files = [folder / name for name in stored_weights(folder)]
    size = sum(file.stat().st_size for file in files)
    if size > 1 << 30:
        progress(f"reading {size / 1e9:.1f} GB of weights for the model's fingerprint, which is cached")
    content: dict[str, Any] = {
        "config": _shaping(config),
        "dtype": dtype,
        "weights": {file.name: file_digest(file, cache_dir) for file in files},
    }
    if rope_regime is not None:
        content["rope_regime"] = rope_regime
    if quantize != "none":
        content["quantize"] = quantize
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _shaping(config: dict[str, Any]) -> dict[str, Any]:
    left_out = _NO_PART_IN_KV if _counts_from_padding(config.get("model_type")) else _NO_PART_IN_KV | {_PADDING}
    return {
        key: _shaping(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in left_out
    }


def _counts_from_padding(model_type: Any) -> bool:
    """Whether positions of models of the type depend on the id of padding."""
    if model_type not in CONFIG_MAPPING:
        return False
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING):
        if (model_class := mapping.get(CONFIG_MAPPING[model_type], None)) is not None:
            names = vars(sys.modules[model_class.__module__])
            return any(
                name == _POSITIONS_BY_PADDING or hasattr(value, _POSITIONS_BY_PADDING) for name, value in names.items()
            )
    return False
