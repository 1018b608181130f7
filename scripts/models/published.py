"""Configs of the models that are used most, as published: only fields that differ from their class's default, and all sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING

PUBLISHED = "published:"
"""Before the names of such models."""
_VOCAB_SIZE = 264
_SMALL = 16
"""Sizes up to this stay: a norm of very few numbers is nearly a step."""
_LENGTH = 8
"""Tokens of windows and chunks of the scaled model."""
_SIZES = re.compile(
    r"\w*hidden_size\w*|\w*intermediate_size|(\w+_)?head_dim|\w+_lora_rank|d_model|d_ff|d_kv|n_embd|\w*ffn_dim|mamba_d_state"
    r"|word_embed_proj_dim|mamba_d_ssm|mamba_d_head|\w*state_size|query_pre_attn_scalar|rotary_dim|n_inner|laurel_rank|mamba_dt_rank"
)
_PER_PAIR = re.compile(r"(long|short)_factor|mrope_section")
_LENGTHS = re.compile(r"\w*sliding_window|\w*chunk_size")


class Published(NamedTuple):
    """A published model."""

    kind: str
    """Its model_type."""
    divisor: int
    """Of its sizes in the trial; 0: the sizes of a replica."""
    fields: dict[str, Any]
    """As in config.json."""
    fewer: Mapping[str, int] = MappingProxyType({})
    """Layers and experts that the trial has of it."""


def published_config(name: str) -> Any:
    """The config of a model in its own size; `name` with the prefix. Raises any exception."""
    model = MODELS[name.removeprefix(PUBLISHED)]
    return CONFIG_MAPPING[model.kind](**model.fields)


def scaled_config(name: str) -> Any | None:
    """The same with all sizes divided by one number, so with the proportions of the published one, and with windows of a few
    tokens. None: the divisor is 0."""
    model = MODELS[name.removeprefix(PUBLISHED)]
    if not model.divisor:
        return None
    config = published_config(name)
    fields = _cut(config.to_dict(), getattr(config, "num_hidden_layers", None), model.fewer)
    return CONFIG_MAPPING[model.kind].from_dict(_scaled(fields, model.divisor))


def _cut(fields: dict[str, Any], count: int | None, fewer: Mapping[str, int]) -> dict[str, Any]:
    """With fewer layers and experts; per-layer lists are cut too."""
    left = fewer.get("num_hidden_layers", count)
    cut = {
        name: value[:left] if isinstance(value, list) and len(value) == count else value
        for name, value in fields.items()
    }
    return {**cut, **fewer}


def _scaled(fields: dict[str, Any], divisor: int) -> dict[str, Any]:
    scaled = dict(fields)
    for name, value in fields.items():
        if isinstance(value, dict):
            scaled[name] = _scaled(value, divisor)
        elif not isinstance(name, str):
            continue
        elif _PER_PAIR.fullmatch(name) and isinstance(value, list):
            scaled[name] = (
                [entry // divisor for entry in value] if "section" in name else value[: len(value) // divisor]
            )
        elif name.startswith("vocab_size") and value is not None:
            scaled[name] = _VOCAB_SIZE
        elif name.endswith("_token_id"):
            scaled[name] = None if name == "eos_token_id" or value is None else _VOCAB_SIZE - 1
        elif isinstance(value, list) and _SIZES.fullmatch(name):
            scaled[name] = [entry // divisor for entry in value]
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif _SIZES.fullmatch(name) and value > _SMALL:
            scaled[name] = value // divisor
        elif _LENGTHS.fullmatch(name) and value < fields.get("max_position_embeddings", value + 1):
            scaled[name] = min(value, _LENGTH)
    return scaled


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


def _every(period: int, layers: int, most: str, last: str) -> list[str]:
    """Types of layers: the last one of each period is another one than the others."""
    return [most if (layer + 1) % period else last for layer in range(layers)]


def _only(layers: int, most: str, other: str, places: tuple[int, ...]) -> list[str]:
    return [other if layer in places else most for layer in range(layers)]


def _llama3(factor: float) -> dict[str, Any]:
    scaling = {"factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
    return {
        "rope_theta": 500000.0,
        "rope_scaling": {**scaling, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "max_position_embeddings": 131072,
        "vocab_size": 128256,
    }


def _yarn(factor: float, original: int = 4096, **more: Any) -> dict[str, Any]:
    return {
        "rope_scaling": {
            "type": "yarn", "factor": factor, "original_max_position_embeddings": original, "beta_fast": 32, "beta_slow": 1, **more
        }
    }  # fmt: skip


def _longrope(pairs: int, **more: Any) -> dict[str, Any]:
    factors = {"short_factor": [1.0 + n / pairs for n in range(pairs)], "long_factor": [1.0 + n for n in range(pairs)]}
    return {
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", **factors, **more},
    }


_SLIDING, _FULL, _LINEAR, _CONV = "sliding_attention", "full_attention", "linear_attention", "conv"
_DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_GEMMA4 = {"head_dim": 256, "global_head_dim": 512, "sliding_window": 512, "final_logit_softcapping": 30.0}
_FEW_EXPERTS = {"num_hidden_layers": 4, "n_routed_experts": 32}

MODELS: dict[str, Published] = {
    "BART large": Published("bart", 0, {"d_model": 1024, "vocab_size": 50265}),
    "BLOOM 560M": Published("bloom", 0, {"hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}),
    "Codestral Mamba 7B": Published(
        "mamba2",
        8,
        {"hidden_size": 4096, "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "num_hidden_layers": 64}
        | {"residual_in_fp32": True, "tie_word_embeddings": False, "vocab_size": 32768},
        {"num_hidden_layers": 4},
    ),
    "Command R": Published(
        "cohere", 16, _sizes(8192, 22528, 40, 64, 64, logit_scale=0.0625, rope_theta=8e6, max_position_embeddings=131072),
        {"num_hidden_layers": 4},
    ),
    "Command R7B": Published(
        "cohere2", 16,
        _sizes(4096, 14336, 32, 32, 8, sliding_window=4096, logit_scale=0.25, rope_theta=50000.0, head_dim=128)
        | {"sliding_window_pattern": 4, "max_position_embeddings": 132096},
        {"num_hidden_layers": 8},
    ),
    "DeepSeek V2 Lite": Published(
        "deepseek_v2", 16,
        _sizes(2048, 10944, 27, 16, 16, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6)
        | _DEEPSEEK | _yarn(40, mscale=0.707, mscale_all_dim=0.707)
        | {"q_lora_rank": None, "first_k_dense_replace": 1, "topk_method": "greedy", "norm_topk_prob": False},
        _FEW_EXPERTS,
    ),
    "DeepSeek V3": Published(
        "deepseek_v3", 16,
        _sizes(7168, 18432, 61, 128, 128, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1)
        | {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
        | _DEEPSEEK | _yarn(40, mscale=1.0, mscale_all_dim=1.0) | {"q_lora_rank": 1536, "max_position_embeddings": 163840},
        _FEW_EXPERTS,
    ),
    "EXAONE 4.0 32B": Published(
        "exaone4", 16,
        _sizes(5120, 27392, 64, 40, 8, sliding_window=4096, sliding_window_pattern=4, rope_theta=1e6)
        | {"max_position_embeddings": 131072, "rope_scaling": _llama3(16.0)["rope_scaling"]},
        {"num_hidden_layers": 8},
    ),
    "Falcon 7B": Published(
        "falcon", 0,
        {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True, "parallel_attn": True},
    ),
    "Falcon-H1 0.5B": Published(
        "falcon_h1", 8,
        _sizes(1024, 2048, 36, 8, 2, head_dim=64, mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64, mamba_d_state=128)
        | {"mamba_rms_norm": False, "mamba_chunk_size": 128, "rope_theta": 1e11, "key_multiplier": 0.5, "lm_head_multiplier": 0.039}
        | {"embedding_multiplier": 5.65, "attention_out_multiplier": 0.9375, "mlp_multipliers": [0.88, 0.26]}
        | {"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23, "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35]},
        {"num_hidden_layers": 3},
    ),
    "Gemma 2 2B": Published(
        "gemma2", 16, _sizes(2304, 9216, 26, 8, 4, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096),
        {"num_hidden_layers": 4},
    ),
    "Gemma 3 1B": Published(
        "gemma3_text", 16,
        _sizes(1152, 6912, 26, 4, 1, head_dim=256, query_pre_attn_scalar=256, sliding_window=512, sliding_window_pattern=6)
        | {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "max_position_embeddings": 32768},
        {"num_hidden_layers": 6},
    ),
    "Gemma 3 4B": Published(
        "gemma3", 0,
        {"text_config": _sizes(2560, 10240, 34, 8, 4, head_dim=256, sliding_window=1024, query_pre_attn_scalar=256)
         | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1e6}},
    ),
    "Gemma 3n E2B": Published(
        "gemma3n_text", 16,
        _sizes(2048, 8192, 30, 8, 2, head_dim=256, num_kv_shared_layers=10, sliding_window=512, laurel_rank=64)
        | {"activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "layer_types": _every(5, 30, _SLIDING, _FULL)}
        | {"hidden_size_per_layer_input": 256, "max_position_embeddings": 32768},
    ),
    "Gemma 4 E2B": Published(
        "gemma4_text", 16,
        _sizes(1536, 6144, 35, 8, 1, num_kv_shared_layers=20, use_double_wide_mlp=True, layer_types=_every(5, 35, _SLIDING, _FULL))
        | _GEMMA4,
    ),
    "Gemma 4 E4B": Published(
        "gemma4_text", 16,
        _sizes(2560, 10240, 42, 8, 2, num_kv_shared_layers=18, layer_types=_every(6, 42, _SLIDING, _FULL)) | _GEMMA4,
    ),
    "GLM-4 9B": Published(
        "glm4", 16,
        _sizes(4096, 13696, 40, 32, 2, head_dim=128, partial_rotary_factor=0.5, max_position_embeddings=32768),
        {"num_hidden_layers": 4},
    ),
    "GLM-4.5 Air": Published(
        "glm4_moe", 16,
        _sizes(4096, 10944, 46, 96, 8, head_dim=128, partial_rotary_factor=0.5, attention_bias=True, rope_theta=1e6)
        | {"moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8, "first_k_dense_replace": 1},
        _FEW_EXPERTS,
    ),
    "gpt-oss 20B": Published(
        "gpt_oss", 8,
        _sizes(2880, 2880, 24, 64, 8, head_dim=64, sliding_window=128, num_local_experts=32, num_experts_per_tok=4)
        | _yarn(32.0, truncate=False) | {"rope_theta": 150000.0, "max_position_embeddings": 131072},
        {"num_hidden_layers": 4},
    ),
    "GPT-2": Published("gpt2", 8, {"n_embd": 768, "n_layer": 12, "n_head": 12}, {"n_layer": 4}),
    "Granite 3.3 2B": Published(
        "granite", 8,
        _sizes(2048, 8192, 40, 32, 8, attention_multiplier=0.015625, embedding_multiplier=12.0, logits_scaling=8.0)
        | {"residual_multiplier": 0.22, "rope_theta": 1e7, "tie_word_embeddings": True, "max_position_embeddings": 131072},
        {"num_hidden_layers": 6},
    ),
    "Granite 4.0 H Tiny": Published(
        "granitemoehybrid", 8,
        _sizes(1536, 512, 40, 12, 4, shared_intermediate_size=1024, num_local_experts=64, num_experts_per_tok=6)
        | {"attention_multiplier": 0.0078125, "embedding_multiplier": 12, "logits_scaling": 6, "residual_multiplier": 0.22}
        | {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "position_embedding_type": "nope"}
        | {"layer_types": _only(40, _LINEAR, _FULL, (5, 15, 25, 35)), "max_position_embeddings": 131072},
        {"num_hidden_layers": 8, "num_local_experts": 16},
    ),
    "Jamba 1.5 Mini": Published(
        "jamba", 16, _sizes(4096, 14336, 32, 32, 8, num_experts=16, attn_layer_period=8, attn_layer_offset=4),
        {"num_hidden_layers": 8, "num_experts": 4},
    ),
    "Kimi K2": Published(
        "deepseek_v3", 16,
        _sizes(7168, 18432, 61, 64, 64, moe_intermediate_size=2048, n_routed_experts=384, n_shared_experts=1, rope_theta=50000.0)
        | {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827}
        | _DEEPSEEK | _yarn(32, mscale=1.0, mscale_all_dim=1.0) | {"q_lora_rank": 1536, "max_position_embeddings": 131072},
        _FEW_EXPERTS,
    ),
    "Kimi Linear 48B": Published("kimi_linear", 0, {}),
    "LFM2 1.2B": Published(
        "lfm2", 8,
        _sizes(2048, 12288, 16, 32, 8, block_ffn_dim_multiplier=1.0, block_multiple_of=256, rope_theta=1e6)
        | {"layer_types": _only(16, _CONV, _FULL, (2, 5, 8, 10, 12, 14))},
    ),
    "Llama 3.1 8B": Published("llama", 16, _sizes(4096, 14336, 32, 32, 8, **_llama3(8.0)), {"num_hidden_layers": 4}),
    "Llama 3.2 1B": Published(
        "llama", 8, _sizes(2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True, **_llama3(32.0)),
        {"num_hidden_layers": 4},
    ),
    "Llama 3.3 70B": Published("llama", 16, _sizes(8192, 28672, 80, 64, 8, **_llama3(8.0)), {"num_hidden_layers": 4}),
    "Mamba2 2.7B": Published(
        "mamba2",
        8,
        {"hidden_size": 2560, "num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1, "num_hidden_layers": 64},
        {"num_hidden_layers": 4},
    ),
    "MiniMax M2": Published(
        "minimax_m2", 16,
        _sizes(3072, 1536, 62, 48, 8, head_dim=128, num_local_experts=256, num_experts_per_tok=8, rotary_dim=64, rope_theta=5e6),
        {"num_hidden_layers": 4, "num_local_experts": 32},
    ),
    "Ministral 3 8B": Published(
        "mistral3", 0,
        {"text_config": _sizes(4096, 14336, 34, 32, 8, model_type="ministral3", head_dim=128, max_position_embeddings=262144)
         | {"rope_parameters": {"type": "yarn", "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0}
            | {"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384}
            | {"llama_4_scaling_beta": 0.1}}},
    ),
    "Mistral 7B v0.3": Published(
        "mistral", 16,
        _sizes(4096, 14336, 32, 32, 8, sliding_window=None, rope_theta=1e6, max_position_embeddings=32768, vocab_size=32768),
        {"num_hidden_layers": 4},
    ),
    "Mistral Small 3": Published(
        "mistral", 16,
        _sizes(5120, 32768, 40, 32, 8, head_dim=128, sliding_window=None, rope_theta=1e8, max_position_embeddings=32768),
        {"num_hidden_layers": 4},
    ),
    "Mistral Small 3.1": Published(
        "mistral3", 0,
        {"text_config": _sizes(5120, 32768, 40, 32, 8, model_type="mistral", head_dim=128, sliding_window=None, rope_theta=1e9)
         | {"max_position_embeddings": 131072, "vocab_size": 131072}},
    ),
    "Mixtral 8x7B": Published(
        "mixtral", 16,
        _sizes(4096, 14336, 32, 32, 8, sliding_window=None, rope_theta=1e6, num_local_experts=8, num_experts_per_tok=2),
        {"num_hidden_layers": 4},
    ),
    "Nemotron Mini 4B": Published(
        "nemotron", 16,
        _sizes(3072, 9216, 32, 24, 8, head_dim=128, partial_rotary_factor=0.5, max_position_embeddings=4096),
        {"num_hidden_layers": 4},
    ),
    "Nemotron Nano 9B v2": Published(
        "nemotron_h", 16,
        {"hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"}
        | {"hidden_size": 4480, "intermediate_size": 15680, "num_attention_heads": 40, "num_key_value_heads": 8}
        | {"mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8, "max_position_embeddings": 131072},
        {"num_hidden_layers": 16},
    ),
    "Nemotron 3 Nano 30B": Published(
        "nemotron_h", 8,
        {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
        | {"hidden_size": 2688, "intermediate_size": 1856, "num_attention_heads": 32, "num_key_value_heads": 2}
        | {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "max_position_embeddings": 262144}
        | {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "routed_scaling_factor": 2.5}
        | {"moe_shared_expert_intermediate_size": 3712},
        {"num_hidden_layers": 8, "n_routed_experts": 16},
    ),
    "OLMo 2 7B": Published(
        "olmo2", 16, _sizes(4096, 11008, 32, 32, 32, rope_theta=500000.0, max_position_embeddings=4096), {"num_hidden_layers": 4}
    ),
    "Olmo 3 7B": Published(
        "olmo3", 16,
        _sizes(4096, 11008, 32, 32, 32, rope_theta=500000.0, max_position_embeddings=65536, sliding_window=4096)
        | _yarn(8.0, 8192, attention_factor=1.2079) | {"layer_types": _every(4, 32, _SLIDING, _FULL)},
        {"num_hidden_layers": 4},
    ),
    "OPT 350M": Published(
        "opt", 8,
        {"hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "word_embed_proj_dim": 512}
        | {"do_layer_norm_before": False},
        {"num_hidden_layers": 4},
    ),
    "OPT 1.3B": Published(
        "opt", 8,
        {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32, "word_embed_proj_dim": 2048},
        {"num_hidden_layers": 4},
    ),
    "Phi-3 mini 4k": Published(
        "phi3", 12,
        _sizes(3072, 8192, 32, 32, 32, sliding_window=2047, max_position_embeddings=4096, original_max_position_embeddings=4096),
        {"num_hidden_layers": 4},
    ),
    "Phi-3.5 mini": Published(
        "phi3", 12, _sizes(3072, 8192, 32, 32, 32, sliding_window=262144, **_longrope(48)), {"num_hidden_layers": 4}
    ),
    "Phi-3.5 MoE": Published(
        "phimoe", 16,
        _sizes(4096, 6400, 32, 32, 8, num_local_experts=16, attention_bias=True, lm_head_bias=True)
        | _longrope(64, short_mscale=1.243, long_mscale=1.271, original_max_position_embeddings=4096),
        {"num_hidden_layers": 4},
    ),
    "Phi-4": Published(
        "phi3", 16,
        _sizes(5120, 17920, 40, 40, 10, rope_theta=250000.0, max_position_embeddings=16384)
        | {"original_max_position_embeddings": 16384, "sliding_window": None, "vocab_size": 100352},
        {"num_hidden_layers": 4},
    ),
    "Phi-4 mini": Published(
        "phi3", 16,
        _sizes(3072, 8192, 32, 24, 8, partial_rotary_factor=0.75, sliding_window=262144, tie_word_embeddings=True, **_longrope(48)),
        {"num_hidden_layers": 4},
    ),
    "Pythia 1.4B": Published(
        "gpt_neox", 8,
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16, "rotary_pct": 0.25},
        {"num_hidden_layers": 4},
    ),
    "Qwen2.5 0.5B": Published(
        "qwen2", 8,
        _sizes(896, 4864, 24, 14, 2, rope_theta=1e6, tie_word_embeddings=True, max_window_layers=21, sliding_window=32768)
        | {"use_sliding_window": False, "max_position_embeddings": 32768},
        {"num_hidden_layers": 4},
    ),
    "Qwen2.5 7B": Published(
        "qwen2", 16,
        _sizes(3584, 18944, 28, 28, 4, rope_theta=1e6, max_window_layers=28, sliding_window=131072, use_sliding_window=False),
        {"num_hidden_layers": 4},
    ),
    "Qwen2.5-VL 7B": Published(
        "qwen2_5_vl", 0,
        _sizes(3584, 18944, 28, 28, 4, rope_theta=1e6, max_window_layers=28, use_sliding_window=False, vocab_size=152064)
        | {"max_position_embeddings": 128000, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
    ),
    "Qwen3 0.6B": Published(
        "qwen3", 16, _sizes(1024, 3072, 28, 16, 8, head_dim=128, rope_theta=1e6, tie_word_embeddings=True, max_window_layers=28)
        | {"max_position_embeddings": 40960},
        {"num_hidden_layers": 4},
    ),
    "Qwen3 30B A3B": Published(
        "qwen3_moe", 16,
        _sizes(2048, 6144, 48, 32, 4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
        | {"norm_topk_prob": True, "rope_theta": 1e6, "max_position_embeddings": 40960, "mlp_only_layers": []},
        {"num_hidden_layers": 4, "num_experts": 32},
    ),
    "Qwen3-Next 80B A3B": Published(
        "qwen3_next", 16,
        _sizes(2048, 5120, 48, 16, 2, head_dim=256, partial_rotary_factor=0.25, rope_theta=1e7, max_position_embeddings=262144)
        | {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4},
        {"num_hidden_layers": 4, "num_experts": 32},
    ),
    "SmolLM2 135M": Published(
        "llama", 8, _sizes(576, 1536, 30, 9, 3, rope_theta=100000.0, tie_word_embeddings=True, max_position_embeddings=8192),
        {"num_hidden_layers": 4},
    ),
    "SmolLM3 3B": Published(
        "smollm3", 16, _sizes(2048, 11008, 36, 16, 4, rope_theta=5e6, max_position_embeddings=65536, no_rope_layer_interval=4),
        {"num_hidden_layers": 4},
    ),
    "StarCoder2 3B": Published(
        "starcoder2", 16,
        _sizes(3072, 12288, 30, 24, 2, sliding_window=4096, rope_theta=999999.4420358813, max_position_embeddings=16384)
        | {"use_bias": True},
        {"num_hidden_layers": 4},
    ),
    "T5 base": Published("t5", 0, {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0}),
    "Flan-T5 base": Published(
        "t5", 0,
        {"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12, "feed_forward_proj": "gated-gelu"}
        | {"tie_word_embeddings": False, "decoder_start_token_id": 0},
    ),
}  # fmt: skip
