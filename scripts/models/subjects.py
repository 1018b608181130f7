"""The types that are tried, and their configs."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from .published import MODELS, PUBLISHED, published_config

SEQ2SEQ = "seq2seq:"
"""Before the names of types that are tried as encoder-decoder models."""
COMPOSITE = "composite:"
"""Before the names of types that read images or sound too, and have no class for texts alone."""

# Fields of published models that the default config of the type lacks.
_FIELDS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 10,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": None,
        },
    },
    # Rotations of Qwen2-VL's kind have sections for text, height and width; the classes' own default fits heads of 128 only.
    **{
        kind: {
            "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}}
        }
        for kind, sections in {
            "glm46v": [8, 12, 12],
            "glm4v": [8, 12, 12],
            "glm4v_moe": [8, 12, 12],
            "glm_ocr": [16, 24, 24],
            "paddleocr_vl": [16, 24, 24],
            "qwen2_5_omni_thinker": [16, 24, 24],
            "qwen2_5_vl": [16, 24, 24],
            "qwen2_vl": [16, 24, 24],
        }.items()
    },
    "emu3": {
        "vq_config": {"base_channels": 32},
        "vocabulary_map": {"<image>": 20, "<|extra_200|>": 21, "<|visual token 000000|>": 22},
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
    """Every model_type that the installed transformers has a causal language model for, and the variants; less those of
    encoder-decoder models, whose decoder alone is rarely a model."""
    kinds = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not _is_encoder_decoder(kind)]
    return sorted([*kinds, *_VARIANTS])


def _is_encoder_decoder(kind: str) -> bool:
    return bool(getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False))


def all_published() -> list[str]:
    """The published models, with the prefix."""
    return [f"{PUBLISHED}{name}" for name in MODELS]


def all_composite_types() -> list[str]:
    """Every other model_type that transformers has a model for that reads text together with images or sound, with the prefix."""
    kinds = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    return sorted(f"{COMPOSITE}{kind}" for kind in kinds if not _is_encoder_decoder(kind))


_SEQ2SEQ_FIELDS: dict[str, dict[str, Any]] = {
    # BERT as both halves, as it is published most often.
    "encoder-decoder": {
        "encoder": {"model_type": "bert"},
        "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
        "decoder_start_token_id": 101,
    },
    **{kind: {"decoder_start_token_id": 0} for kind in ("longt5", "mt5", "switch_transformers", "t5", "umt5")},
}


def all_seq2seq_types() -> list[str]:
    """Every other model_type that it has a sequence-to-sequence language model for, with the prefix, and the encoder-decoder models
    among the causal ones."""
    kinds = {*MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*all_types()}
    kinds -= {kind.removeprefix(COMPOSITE) for kind in all_composite_types()}
    return sorted(f"{SEQ2SEQ}{kind}" for kind in kinds)


def default_seq2seq_config(kind: str) -> Any:
    """The same for a type of an encoder-decoder model; `kind` without the prefix. Raises any exception."""
    return CONFIG_MAPPING[kind](**_SEQ2SEQ_FIELDS.get(kind, {}))


def default_config(kind: str) -> Any:
    """The type's default config in transformers, completed if it cannot run otherwise; a published model's as it is. Raises any
    exception."""
    if kind.startswith(PUBLISHED):
        return published_config(kind)
    if kind.startswith(SEQ2SEQ):
        return default_seq2seq_config(kind.removeprefix(SEQ2SEQ))
    kind = kind.removeprefix(COMPOSITE)
    if kind in _VARIANTS:
        of, fields = _VARIANTS[kind]
        return CONFIG_MAPPING[of](**fields)
    fields = dict(_FIELDS.get(kind, {}))
    if kind in _IS_DECODER:
        fields["is_decoder"] = True
    return CONFIG_MAPPING[kind](**fields)
