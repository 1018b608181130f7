"""The config that the header of a GGUF file means. What changes the computation is taken over, or refused by its name.

transformers reads a part of the header's keys and drops the others in silence, so the text would be that of another model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from transformers import AutoConfig, PreTrainedConfig

from ..errors import ModelError, library_errors
from .files import require_gguf

_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "activation_sparsity_scale": (),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "attention.max_alibi_bias": (),
    "attention.relative_buckets_count": ("relative_attention_num_buckets",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings", "n_positions"),
    "decoder_block_count": ("num_decoder_layers",),
    "decoder_start_token_id": ("decoder_start_token_id",),
    "embedding_length": ("hidden_size",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "embedding_scale": ("embedding_multiplier",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "feed_forward_length": ("intermediate_size",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale",),
    "residual_scale": ("residual_multiplier",),
    "shortconv.l_cache": ("conv_L_cache",),
    "sliding_window": ("sliding_window",),
    "ssm.conv_kernel": ("conv_kernel",),
    "ssm.inner_size": ("intermediate_size",),
    "ssm.state_size": ("state_size",),
    "ssm.time_step_rank": ("time_step_rank",),
    "use_parallel_residual": ("use_parallel_residual",),
    "vocab_size": ("vocab_size",),
}
"""Keys below the architecture's name, and the fields of configs that mean the same. The first field that the class has counts."""
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.head_count": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "ssm.dt_b_c_rms": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
}
"""Values that change nothing in a model without the field."""
_WITHOUT_FIELD: Final = frozenset(
    {"attention.head_count_kv", "context_length", "decoder_block_count", "feed_forward_length"}
)
"""Keys that a class may have no field for: the shapes of its tensors follow from them, or it has no longest text."""
_WITHOUT_EFFECT: Final = frozenset({"pooling_type", "rope.scaling.finetuned", "embedding_length_out"})
"""Keys that no logit of a language model depends on."""
_READ_BY_TRANSFORMERS: Final[Mapping[str, frozenset[str]]] = dict.fromkeys(
    ("qwen35", "qwen35moe"),
    frozenset({"block_count", "full_attention_interval", "nextn_predict_layers", "rope.dimension_count"})
    | {"rope.dimension_sections", "ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size"}
    | {"ssm.time_step_rank"},
) | {
    "lfm2": frozenset({"attention.head_count_kv", "rope.dimension_count"}),
    "gemma4": frozenset({"attention.key_length"}),
    "minimax-m2": frozenset({"expert_gating_func", "rope.dimension_count"}),
}
"""More keys that transformers takes over, by architecture."""
_ROPE: Final = "rope."
_PARTIAL_ROPE: Final = frozenset({"stablelm", "nemotron", "phi3", "minimax_m2"})
"""Values of model_type that rotate the part of a head that `partial_rotary_factor` says."""
_WIDE_GEMMAS: Final = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and layers of the models whose scale is that of hidden size / heads; no key of the header says so."""
_UNUSED_TENSORS: Final = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|.*\.attn_rot_embd(\..*)?|.*\.nextn\..*"
)
"""Tensors that are no weights of the model: of its RoPE, which goes into the config, and of layers that predict ahead."""
_PLAIN: Final = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


class _Reader(GGUFReader):  # type: ignore[misc]  # the library has no types
    """The library's reader, in a third of the time. The library cuts a vocabulary into a hundred thousand pieces of the file, and
    numpy makes a memory map of each piece of a memory map."""

    @property
    def data(self) -> Any:
        """The file's bytes."""
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = mapped.view(np.ndarray)


class GgufFile(NamedTuple):
    """A GGUF file that is whole, and the only part of its model."""

    path: Path
    reader: Any
    architecture: str
    keys: dict[str, Any]
    """Values below the architecture's name."""

    @property
    def names(self) -> frozenset[str]:
        """Names of its tensors."""
        return frozenset(tensor.name for tensor in self.reader.tensors)

    def tensor(self, name: str) -> list[float] | None:
        """The numbers of a small tensor in float32; None: there is none of that name."""
        for tensor in self.reader.tensors:
            if tensor.name == name:
                return [float(value) for value in tensor.data.flatten()]
        return None


def open_gguf(path: Path) -> GgufFile:
    """Read the file's header. Raises ModelError if the file is broken, or not a whole language model."""
    require_gguf(path)
    with library_errors(f"{path} is cut short or damaged", "Fetch it again."):
        reader = _Reader(path)
        values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    kind = values.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"{path} is no model by itself: its general.type is {kind}. Give the file of the model.")
    if (parts := values.get("split.count", 1)) > 1:
        raise ModelError(
            f"{path} is one of {parts} parts of a model (split.count). Join them with `llama-gguf-split --merge` and give the file "
            "that it writes."
        )
    if (total := values.get("split.tensors.count", len(reader.tensors))) != len(reader.tensors):
        raise ModelError(
            f"{path} has {len(reader.tensors)} of the {total} tensors of its model (split.tensors.count). Fetch the model again."
        )
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"{path} has no general.architecture. Give a GGUF file of a language model.")
    prefix = f"{architecture}."
    keys = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    return GgufFile(path, reader, architecture, keys)


def is_plain(kind: GGMLQuantizationType) -> bool:
    """Whether tensors of the type hold numbers, and not blocks of a quantizer."""
    return kind in _PLAIN


def unused_by_design(name: str) -> bool:
    """Whether a tensor is no weight of the model."""
    return _UNUSED_TENSORS.fullmatch(name) is not None


def gguf_config(file: GgufFile) -> Any:
    """transformers' config of the model in the file. Raises ModelError if it cannot have all that the header asks for."""
    path = file.path
    _refuse_lists(file)
    with library_errors(f"transformers cannot read {path}"):
        fields, _ = PreTrainedConfig.get_config_dict(path.parent, gguf_file=path.name, local_files_only=True)
        fields = dict(fields)
        kind = fields.pop("model_type")
        config = AutoConfig.for_model(kind, **fields)
        changes = _changes(file, config, AutoConfig.for_model(kind))
        if changes:
            config = AutoConfig.for_model(kind, **fields | changes)
            for name, value in changes.items():
                if not _equal(getattr(config, name), value):
                    raise ModelError(
                        f"{path} needs {name} = {value}, which transformers' config of {kind} does not keep."
                    )
        _set_rope(file, config)
        config.validate_rope()
    return config


def _refuse_lists(file: GgufFile) -> None:
    """Raises ModelError if a size differs between layers: transformers' config has one."""
    for key, value in file.keys.items():
        if key in _FIELDS and isinstance(value, list) and file.architecture not in _READ_BY_TRANSFORMERS:
            raise _refused(file, key, value)


def _changes(file: GgufFile, config: Any, default: Any) -> dict[str, Any]:
    """Fields in which the config differs from the header. default: a config of the class, for what fields it has."""
    changes: dict[str, Any] = {}
    read = _READ_BY_TRANSFORMERS.get(file.architecture, frozenset())
    keys = file.keys
    heads = keys.get("attention.head_count") or 1
    head_dim = keys.get("attention.key_length") or keys.get("embedding_length", 0) // heads
    for key, value in keys.items():
        if key in read or key in _WITHOUT_EFFECT or key.startswith(_ROPE):
            continue
        if key in ("attention.key_length", "attention.value_length"):
            if value != head_dim:
                raise _refused(file, key, value)
            continue
        if key == "attention.sliding_window_pattern":
            changes |= _layer_types(file, config, default)
            continue
        field = next((name for name in _FIELDS.get(key, ()) if hasattr(default, name)), None)
        if key == "attention.sliding_window" and (field is None or hasattr(default, "use_sliding_window")):
            if 0 < value < keys.get("context_length", math.inf):
                raise _refused(file, key, value)
        elif field is None:
            if key not in _WITHOUT_FIELD and not _is_neutral(key, value):
                raise _refused(file, key, value)
        elif not _equal(getattr(config, field), value):
            changes[field] = value
    if file.architecture not in _READ_BY_TRANSFORMERS:
        changes |= _head_dim(file, config, default, head_dim)
    if (file.architecture, keys.get("block_count")) in _WIDE_GEMMAS:
        changes["query_pre_attn_scalar"] = keys["embedding_length"] // heads
    return changes


def _head_dim(file: GgufFile, config: Any, default: Any, head_dim: int) -> dict[str, Any]:
    """The field of the head size, if the file's differs from the config's; empty otherwise."""
    field = next((name for name in ("head_dim", "d_kv") if hasattr(default, name) or hasattr(config, name)), None)
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, field) if field is not None else None
    size = size or (config.hidden_size // heads if heads else head_dim)
    if size == head_dim:
        return {}
    if field is None:
        raise _refused(file, "attention.key_length", head_dim)
    return {field: head_dim}


def _layer_types(file: GgufFile, config: Any, default: Any) -> dict[str, Any]:
    """The kinds of layers by a period, of which the last is one with full attention, or by a list of those with a window."""
    pattern = file.keys["attention.sliding_window_pattern"]
    if not hasattr(default, "layer_types"):
        raise _refused(file, "attention.sliding_window_pattern", pattern)
    layers = range(config.num_hidden_layers)
    windows = pattern if isinstance(pattern, list) else [pattern > 0 and (index + 1) % pattern != 0 for index in layers]
    types = ["sliding_attention" if window else "full_attention" for window in windows]
    return {} if types == config.layer_types else {"layer_types": types}


def _set_rope(file: GgufFile, config: Any) -> None:
    """Take over the keys and tensors of RoPE, in place. Raises ModelError."""
    text = config.get_text_config(decoder=True)
    keys = {key.removeprefix(_ROPE): value for key, value in file.keys.items() if key.startswith(_ROPE)}
    read = {key.removeprefix(_ROPE) for key in _READ_BY_TRANSFORMERS.get(file.architecture, ())}
    parameters = getattr(text, "rope_parameters", None)
    if parameters is None:
        if keys:
            raise _refused(file, *next((_ROPE + key, value) for key, value in keys.items()))
        return
    # With a kind of RoPE for each kind of layer, the keys are those of the layers that see everything.
    rope = parameters.get("full_attention", parameters)
    sliding = parameters.get("sliding_attention")
    scaling: dict[str, Any] = {}
    for key, value in keys.items():
        if key in read or key == "scaling.finetuned":
            continue
        if key == "freq_base":
            rope["rope_theta"] = value
        elif key == "freq_base_swa" and sliding is not None:
            sliding["rope_theta"] = value
        elif key == "dimension_count":
            _set_rotated_part(file, text, rope, value)
        elif key == "scale_linear":
            scaling |= {"type": "linear", "factor": value}
        elif key.removeprefix("scaling.") in _SCALING:
            scaling[key.removeprefix("scaling.")] = value
        elif not _is_neutral(_ROPE + key, value):
            raise _refused(file, _ROPE + key, value)
    factors = [file.tensor(f"{name}.weight") for name in ("rope_freqs", "rope_factors_short", "rope_factors_long")]
    rope |= _scaled(file, text, scaling, *factors)


_SCALING: Final = frozenset(
    {"type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow"}
)


def _set_rotated_part(file: GgufFile, text: Any, rope: dict[str, Any], rotated: int) -> None:
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    current = rope.get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None) or 1.0
    if int(head_dim * current) == rotated:
        return
    if text.model_type not in _PARTIAL_ROPE:
        raise _refused(file, "rope.dimension_count", rotated)
    rope["partial_rotary_factor"] = rotated / head_dim


def _scaled(
    file: GgufFile,
    text: Any,
    scaling: Mapping[str, Any],
    freqs: list[float] | None,
    short: list[float] | None,
    long: list[float] | None,
) -> dict[str, Any]:
    """What the scaling keys and the tensors of factors change in the parameters of RoPE."""
    factor = scaling.get("factor") or 1.0
    # Without a type, a factor is linear.
    kind = scaling.get("type", "linear")
    original = scaling.get("original_context_length") or text.max_position_embeddings
    attention_factor = scaling.get("attn_factor") or 1.0
    if freqs is not None and set(freqs) != {1.0}:
        if kind != "none" and factor != 1.0:
            raise _refused(file, "rope.scaling.type", f"{kind} next to the tensor rope_freqs.weight")
        short = long = freqs
        original, attention_factor = text.max_position_embeddings, 1.0
    elif attention_factor != 1.0 and kind != "longrope" and short is None:
        raise _refused(file, "rope.scaling.attn_factor", attention_factor)
    if short is not None and long is not None:
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "factor": text.max_position_embeddings / original,
            "original_max_position_embeddings": original,
            "attention_factor": attention_factor,
        }
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        betas = {name: scaling[f"yarn_{name}"] for name in ("beta_fast", "beta_slow") if f"yarn_{name}" in scaling}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}
    raise _refused(file, "rope.scaling.type", kind)


def _is_neutral(key: str, value: Any) -> bool:
    return any(_equal(value, neutral) for neutral in _NEUTRAL.get(key, ()))


def _equal(value: Any, other: Any) -> bool:
    is_number = isinstance(value, int | float) and isinstance(other, int | float)
    return math.isclose(value, other, rel_tol=1e-6) if is_number else bool(value == other)


def _refused(file: GgufFile, key: str, value: Any) -> ModelError:
    return ModelError(
        f"{file.path} has {file.architecture}.{key} = {value}, which changes what the model computes and is not supported for this "
        "architecture. Give the model as safetensors."
    )
