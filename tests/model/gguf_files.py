"""Writes the GGUF file of a model of transformers, as converters write it: llama.cpp's names, keys and order of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

from tests.tiny_models import VOCAB_SIZE

QuantizationOf = Callable[[str], GGMLQuantizationType]


def header(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    """The keys that every converter writes, with the values of the model's config."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }
    for field, key in (("rms_norm_eps", "rms_epsilon"), ("layer_norm_eps", "epsilon"), ("norm_epsilon", "epsilon")):
        if (value := getattr(config, field, None)) is not None:
            keys[f"attention.layer_norm_{key}"] = value
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    keys["rope.freq_base"] = float(rope["rope_theta"])
    keys["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    more: Mapping[str, Any] | None = None,
    *,
    leave_out: str | None = None,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
    quantization: QuantizationOf = lambda name: GGMLQuantizationType.F32,
) -> list[str]:
    """Write the file; returns the names of all its tensors. more: other keys, or other values of them, with or without the
    architecture's name before them; None takes a key away. leave_out: a tensor that the file lacks. quantization: of matrices."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, architecture)
    own = ("tokenizer.", "split.", "general.", f"{architecture}.")
    named = {key if key.startswith(own) else f"{architecture}.{key}": value for key, value in (more or {}).items()}
    for key, value in {**header(model, architecture), **named}.items():
        _add(writer, key, value)
    _add_tokenizer(writer)
    tensors = {**_tensors(model, architecture), **(extra or {})}
    for name, tensor in tensors.items():
        kind = quantization(name) if tensor.ndim > 1 else GGMLQuantizationType.F32
        if name != leave_out:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return list(tensors)


def _tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray[Any, Any]]:
    kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    config = model.config.get_text_config()
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        values = tensor.float().numpy()
        stem, _, suffix = name.rpartition(".")
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            layer = name.split(".")[2]
            parts = {"gate": values[:, : len(values[0]) // 2], "up": values[:, len(values[0]) // 2 :]}
            parts = parts if "gate_up" in name else {"down": values}
            found |= {f"blk.{layer}.ffn_{part}_exps.weight": np.ascontiguousarray(rows) for part, rows in parts.items()}
            continue
        stored = names.get_name(stem)
        assert stored is not None, name
        if kind is MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if (
            kind in (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3, MODEL_ARCH.NEMOTRON)
            and "norm" in name
            and suffix == "weight"
        ):
            values = values + 1
        found[f"{stored}.{suffix}"] = np.ascontiguousarray(values)
    return found


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _add_tokenizer(writer: GGUFWriter) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merge = alphabet[:2]
    tokens = [*alphabet, "".join(merge)]
    tokens += [f"<{index}>" for index in range(len(tokens), VOCAB_SIZE)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(alphabet) + 1) + [3] * (VOCAB_SIZE - len(alphabet) - 1))
    writer.add_token_merges([" ".join(merge)])
    writer.add_eos_token_id(VOCAB_SIZE - 1)
