"""The types that are tried, and their configs."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Fields of published models that the default config of the type lacks.
_FIELDS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 10,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": None,
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "xmod": {"default_language": "en_XX"},
}
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # As published for Phi-3.5-mini and Phi-3.5-MoE. The lists have an entry per pair of rotated dimensions.
    "phi3+longrope": (
        "phi3",
        {
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + pair / 48 for pair in range(48)],
                "long_factor": [1.0 + pair for pair in range(48)],
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "phimoe+longrope": (
        "phimoe",
        {
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + pair / 64 for pair in range(64)],
                "long_factor": [1.0 + pair for pair in range(64)],
                "short_mscale": 1.243,
                "long_mscale": 1.271,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}
"""Types whose published models have another RoPE than their default config."""
_IS_DECODER = frozenset(
    {"bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert", "roberta"}
    | {"big_bird", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"}
)
"""Encoders by default; as causal language models they are used with is_decoder."""


def all_types() -> list[str]:
    """Every model_type that the installed transformers has a causal language model for, and the variants."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *_VARIANTS])


def default_config(kind: str) -> Any:
    """The type's default config in transformers, completed if it cannot run otherwise. Raises any exception."""
    if kind in _VARIANTS:
        of, fields = _VARIANTS[kind]
        return CONFIG_MAPPING[of](**fields)
    fields = dict(_FIELDS.get(kind, {}))
    if kind in _IS_DECODER:
        fields["is_decoder"] = True
    return CONFIG_MAPPING[kind](**fields)
