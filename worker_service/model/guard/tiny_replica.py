"""A tiny model with the rules of a large one: the same class, every kind of layer, small sizes and thresholds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedConfig

from ...attention.interface import ATTENTION_NAME, register
from ..language_model import build_language_model

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")


def num_layers(config: Any, fields: dict[str, Any]) -> int:
    """The number of layers, by a field or by a property of the config's class; 0: unknown."""
    values = [*map(fields.get, _COUNTS), *(getattr(config, name, None) for name in _COUNTS)]
    return next((value for value in values if isinstance(value, int)), 0)


def kept_layers(config: Any, fields: dict[str, Any]) -> Iterator[list[int]]:
    """Choices of layers for the replica, the smallest first. Each has a layer of every kind, and two layers at least; a kind is the
    combination of a layer's entries in all per-layer lists, those of the fields and those that the config's class derives.

    What a class derives for fewer layers may be something else, which `are_kept` finds. If a period determines a list, all layers
    up to the last one that is the first of its kind are right, and all layers always are.
    """
    count = num_layers(config, fields)
    first_of: dict[str, int] = {}
    seconds: dict[str, int] = {}
    for index, kind in enumerate(_kinds(config, fields, count)):
        # Layers that attend and have a state may share weights with each other: two of them show it.
        if first_of.setdefault(kind, index) != index and "hybrid" in kind:
            seconds.setdefault(kind, index)
    chosen = sorted([*first_of.values(), *seconds.values()])
    with_last = sorted({*chosen, count - 1}) if count else []
    if len(chosen) > 1:
        yield chosen
    yield with_last  # some classes give the last layer a type of their own
    if chosen and max(2, chosen[-1] + 1) < count:
        yield list(range(max(2, chosen[-1] + 1)))
    yield list(range(count))


def are_kept(config: Any, shrunk: dict[str, Any], kept: Sequence[int]) -> bool:
    """Whether a config of the fields `shrunk` has the per-layer lists of the kept layers of the config."""
    try:
        small = type(config).from_dict(deepcopy(shrunk))
        derived = _derived_lists(small, shrunk, len(kept))
        fields = small.to_dict()
    except (
        Exception
    ):  # config classes raise all kinds of errors; if none of the choices can be built, the last one raises it
        return False
    expected = _derived_lists(config, config.to_dict(), num_layers(config, config.to_dict()))
    return all(
        name in derived and _pattern(derived[name]) == _pattern([value[index] for index in kept])
        for name, value in expected.items()
    ) and all(fields[name] == value for name, value in shrunk.items() if isinstance(value, list) and name in fields)


def is_indices(value: Sequence[Any], count: int) -> bool:
    """Whether a list consists of layer indices, not of one entry per layer."""
    return (
        bool(value)
        and all(isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < count for entry in value)
        and all(before < after for before, after in pairwise(value))
    )


def _kinds(config: Any, fields: dict[str, Any], count: int) -> list[str]:
    lists = [value for value in fields.values() if isinstance(value, list)]
    per_layer = [value for value in lists if len(value) == count and not is_indices(value, count)]
    per_layer += _derived_lists(config, fields, count).values()
    ascending = [value for value in lists if is_indices(value, count)]
    first_shared = count - (fields.get("num_kv_shared_layers") or 0)
    overrides = fields.get("per_layer_config") or {}
    by_layer = {int(index): str(override) for index, override in overrides.items()}
    return [
        str(
            [str(value[index]) for value in per_layer]
            + [str(index in value) for value in ascending]
            + [by_layer.get(index, ""), str(index >= first_shared)]
        )
        for index in range(count)
    ]


def _derived_lists(config: Any, fields: dict[str, Any], count: int) -> dict[str, list[Any]]:
    """The lists with an entry per layer that properties of the config's class return."""
    cls = type(config)
    # Those of all configs are about other things, and reading some of them prints a warning.
    names = sorted(set(dir(cls)) - set(dir(PreTrainedConfig)) - fields.keys())
    properties = {name: getattr(config, name, None) for name in names if isinstance(getattr(cls, name, None), property)}
    return {name: value for name, value in properties.items() if isinstance(value, list) and len(value) == count}


def _pattern(entries: Sequence[Any]) -> list[Any]:
    """The entries, with numbers, which are smaller in a replica, replaced by the index of the first that is equal."""
    return [entries.index(entry) if isinstance(entry, int | float) else entry for entry in entries]


VOCAB_SIZE = 264
NUM_PLAIN_TOKENS = 256
"""Tokens below have no special meaning, except those of the config."""
THRESHOLD = 8
"""Length in tokens of sliding windows, chunks and other thresholds, if texts can be that long."""
UNREACHED = 24
"""The same if no text can be that long: the length of the replica's longest texts, but shorter than a packed row of them."""
MAX_POSITIONS = 128

_HIDDEN, _HEADS, _HEAD_DIM = 64, 4, 16
_SMALL = 16
"""Sizes up to this do not change."""
_LARGE = 128
"""A larger number is a size or a length."""
_SOFTCAP = 2.0
"""Low enough to have an effect on the scores of random weights."""
_GAIN = 1.5
"""Standard deviation of a weight times the root of its number of inputs; attention then prefers some tokens."""

_LAYER_COUNTS = re.compile(
    r"num_hidden_layers|num_layers_per_stack|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers"
)
_HIDDEN_SIZES = re.compile(r"hidden_size|d_model|n_embd|emb_dim|embedding_dim|dim_model")
_LENGTHS = re.compile(
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|model_max_length|context_length"
    r"|max_(source|target)_positions"
)
# Fields without effect until a text is that long. A large number with an unknown name may be such a field too.
_THRESHOLDS = re.compile(
    r"(?!max_window_layers)\w*window\w*|\w*chunk\w*|local_attention|index_topk|index_block_size|block_size|\w*floor\w*|rel_extent"
    r"|\w*max_distance|original_max_position_embeddings"
)
_TOKEN_IDS = re.compile(r"\w*_token_ids?|\w+_token_index")
_NOT_OF_THE_MODEL = frozenset(
    {"architectures", "id2label", "label2id", "transformers_version", "_name_or_path", "dtype", "torch_dtype"}
    | {"quantization_config", "_attn_implementation", "attn_implementation"}
)


def replica_config(config: Any, max_model_len: int) -> Any:
    """The config with small sizes. Thresholds below max_model_len become THRESHOLD, others UNREACHED.

    Raises the config class's own errors if the small sizes do not fit together.
    """
    text = config.get_text_config(decoder=True).to_dict()
    return type(config).from_dict(_shrunk(config, max_model_len, _hidden_size(text)))


def replica_length(config: Any, max_model_len: int) -> int:
    """Tokens of the replica's longest texts; UNREACHED if a threshold is above the model's longest text."""
    is_all_reached = all(value < max_model_len for value in thresholds(config) if value > THRESHOLD)
    return min(max_model_len, MAX_POSITIONS if is_all_reached else UNREACHED)


def build_replica(config: Any, seed: int = 0, build: Callable[..., Any] = build_language_model) -> Any:
    """The model of a config, in float32 on the CPU, with random weights that make every part have an effect. build: see
    build_language_model."""
    register()
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:  # norms and the like stay near their initial values, so that signals pass
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise * (_GAIN * parameter.shape[-1] ** -0.5))
    return model.eval()


def thresholds(config: Any) -> set[int]:
    """All lengths in tokens in the config that are, or may be, thresholds, RoPE's included."""
    fields = config.get_text_config(decoder=True).to_dict()
    sizes = _Sizes(fields, 0, 0, 0)
    lengths: set[int] = set()
    parts: list[dict[str, Any]] = [{name: value for name, value in fields.items() if name not in _NOT_OF_THE_MODEL}]
    for part in parts:
        for name, value in part.items():
            if isinstance(value, dict) and "rope" in name:
                parts += [value, *(entry for entry in value.values() if isinstance(entry, dict))]
            elif isinstance(value, int) and not isinstance(value, bool) and sizes.is_threshold(name, value):
                lengths.add(value)
    return lengths


def _shrunk(config: Any, max_model_len: int, hidden_size: int) -> dict[str, Any]:
    """The fields of a config with small sizes. hidden_size: of the text, which other parts of a composite model may refer to."""
    shrunk: dict[str, Any] = {}
    fields = {name: value for name, value in config.to_dict().items() if name not in _NOT_OF_THE_MODEL}
    for layers in kept_layers(config, fields):
        shrunk = _shrunk_to(config, fields, layers, max_model_len, hidden_size)
        if are_kept(config, shrunk, layers):
            break
    return shrunk


def _shrunk_to(
    config: Any, whole: dict[str, Any], layers: list[int], max_model_len: int, hidden_size: int
) -> dict[str, Any]:
    fields, count = dict(whole), num_layers(config, whole)
    nested = [name for name in config.sub_configs if hasattr(getattr(config, name, None), "to_dict")]
    sizes = _Sizes(fields, len(layers), max_model_len, hidden_size)
    for name, value in whole.items():
        if name in nested:
            fields[name] = _shrunk(getattr(config, name), max_model_len, hidden_size)
        elif name == "per_layer_config" and isinstance(value, dict):
            fields[name] = _shrunk_per_layer(value, fields, layers, sizes)
        elif isinstance(value, dict):
            fields[name] = _shrunk_rope(value, fields, sizes) if "rope" in name else value
        elif isinstance(value, list):
            fields[name] = _shrunk_list(name, value, layers, count, sizes)
    num_shared = fields.get("num_kv_shared_layers") or 0
    if num_shared:
        fields["num_kv_shared_layers"] = sum(index >= count - num_shared for index in layers)
    for name, value in whole.items():
        if isinstance(value, int) and not isinstance(value, bool) and name != "num_kv_shared_layers":
            fields[name] = sizes.of(name, value)
        elif isinstance(value, float) and "softcap" in name:
            fields[name] = min(value, _SOFTCAP)
    return fields


def _shrunk_list(name: str, value: list[Any], layers: list[int], count: int, sizes: _Sizes) -> Any:
    if is_indices(value, count):
        return [new for new, old in enumerate(layers) if old in value]
    if count and len(value) == count:
        value = [value[index] for index in layers]
    return [
        sizes.of(name, entry) if isinstance(entry, int) and not isinstance(entry, bool) else entry for entry in value
    ]


def _shrunk_per_layer(
    overrides: dict[Any, dict[str, Any]], fields: dict[str, Any], layers: list[int], sizes: _Sizes
) -> dict[str, dict[str, Any]]:
    """Fields that differ in some layers; larger values stay larger."""
    shrunk: dict[str, dict[str, Any]] = {}
    for index, override in overrides.items():
        if int(index) in layers:
            shrunk[str(layers.index(int(index)))] = {
                name: sizes.of(name, value) * (2 if name == "head_dim" and value > (fields.get(name) or value) else 1)
                if isinstance(value, int) and not isinstance(value, bool)
                else value
                for name, value in override.items()
            }
    return shrunk


def _shrunk_rope(rope: dict[str, Any], fields: dict[str, Any], sizes: _Sizes) -> dict[str, Any]:
    """RoPE parameters, one set or one per layer type; lists have an entry per pair of rotated dimensions."""
    shrunk: dict[str, Any] = {}
    pairs = sizes.rotary_pairs(rope.get("partial_rotary_factor", fields.get("partial_rotary_factor")))
    for name, value in rope.items():
        if isinstance(value, dict):
            shrunk[name] = _shrunk_rope(value, fields, sizes)
        elif isinstance(value, list) and all(isinstance(entry, float | int) for entry in value):
            # Lists for heads smaller than the replica's are too short: their last entry is repeated.
            longer = value + value[-1:] * (pairs - len(value))
            shrunk[name] = _sections(value, pairs) if "section" in name else longer[:pairs]
        elif isinstance(value, int) and not isinstance(value, bool):
            shrunk[name] = sizes.of(name, value)
        else:
            shrunk[name] = value
    return shrunk


def _sections(value: list[Any], pairs: int) -> list[int]:
    """Sections of the rotated pairs in about the same proportions, which sum to `pairs`."""
    shares = [max(1, pairs * int(entry) // sum(value)) for entry in value]
    shares[-1] += pairs - sum(shares)
    return shares


def _hidden_size(fields: dict[str, Any]) -> int:
    return next((fields[name] for name in fields if _HIDDEN_SIZES.fullmatch(name) and isinstance(fields[name], int)), 0)


class _Sizes:
    """Maps the numbers of a config to small ones, by the names of their fields."""

    def __init__(self, fields: dict[str, Any], num_layers: int, max_model_len: int, text_hidden: int) -> None:
        self._fields = dict(fields)  # a copy: the caller overwrites the fields one by one
        self._num_layers = num_layers
        self._max_model_len = max_model_len
        self._hidden = _hidden_size(fields)
        self._text_hidden = text_hidden
        heads = next((fields[n] for n in fields if _RULES[0][0].fullmatch(n) and isinstance(fields[n], int)), 0)
        self._heads = heads
        self._inner = self._inner_sizes()
        # If the head size is not hidden size / heads, it is not in the replica either.
        plain = fields.get("head_dim") in (None, self._hidden // heads if heads else None)
        self.head_dim: int = _HEAD_DIM if plain else 2 * _HEAD_DIM

    def _inner_sizes(self) -> dict[str, int]:
        """Sizes and groups of Mamba's heads, which together are a multiple of the hidden size."""
        fields, sizes = self._fields, dict[str, int]()
        factor = next((fields[name] for name in _EXPANSIONS if isinstance(fields.get(name), int)), None)
        if factor is None:
            return sizes
        inner = fields.get(_INNER_SIZE) or factor * self._hidden
        for heads, dim in _INNER_HEADS:
            if isinstance(fields.get(heads), int) and fields.get(dim) == inner // fields[heads]:
                sizes |= {heads: factor * _HIDDEN // _HEAD_DIM, dim: _HEAD_DIM, _INNER_SIZE: factor * _HIDDEN}
            elif isinstance(fields.get(heads), int) and "mamba" in heads:
                sizes |= {heads: 2 * _HEADS, dim: _HEAD_DIM}
            for groups in _INNER_GROUPS if heads in sizes else ():
                if isinstance(value := fields.get(groups), int):
                    sizes[groups] = max(n for n in range(1, value + 1) if sizes[heads] % n == 0)
        return sizes

    def rotary_pairs(self, share: Any) -> int:
        if "qk_rope_head_dim" in self._fields:
            return _ROPE_HEAD_DIM // 2
        return int(self.head_dim * (share if isinstance(share, float) else 1.0)) // 2

    def of(self, name: str, value: int) -> int:
        small = self._known(name, value)
        return min(value, THRESHOLD if value < self._max_model_len else UNREACHED) if small is None else small

    def is_threshold(self, name: str, value: int) -> bool:
        """Whether the number may be a length in tokens at which a rule changes."""
        return self._known(name, value) is None

    def _known(self, name: str, value: int) -> int | None:
        """The small value of a size; None if the number is, or may be, a threshold."""
        if name in self._inner:
            return self._inner[name]
        if _TOKEN_IDS.fullmatch(name):
            return value if value < NUM_PLAIN_TOKENS else NUM_PLAIN_TOKENS + value % (VOCAB_SIZE - NUM_PLAIN_TOKENS)
        if _LAYER_COUNTS.fullmatch(name):
            return self._num_layers or min(value, 2)
        if _HIDDEN_SIZES.fullmatch(name):
            return _HIDDEN
        if _LENGTHS.fullmatch(name):
            return min(value, MAX_POSITIONS)
        if _THRESHOLDS.fullmatch(name):
            return None
        for names, rule in _RULES:
            if names.fullmatch(name):
                return rule(self, value)
        if value == self._hidden and value > _SMALL:
            return _HIDDEN
        times = value // self._hidden if self._hidden and value % self._hidden == 0 else 0
        if times and name.endswith("hidden_size"):
            return times * _HIDDEN
        if name == "attention_head_dim" and self._heads and value * self._heads % self._hidden == 0:
            return value * self._heads // self._hidden * _HIDDEN // _HEADS
        if re.search(r"(dim|size|width|rank)$", name):
            if value == self._text_hidden and self._hidden != self._text_hidden:
                return _HIDDEN
            return min(value, _SMALL)
        return None if value > _LARGE and name != "rope_theta" else value

    def dims(self, value: int) -> int:
        # With latent attention, the head size is that of the rotated part.
        return _ROPE_HEAD_DIM if value == self._fields.get("qk_rope_head_dim") else self.head_dim

    def linear_heads(self, value: int) -> int:
        """Heads of linear attention: two, and as many times as many values as there were."""
        fewest = min(int(self._fields.get(f"linear_num_{kind}_heads") or value) for kind in ("key", "value"))
        return 2 * (value // fewest)

    def kv_heads(self, value: int) -> int:
        return {1: 1, self._heads: _HEADS}.get(value, _HEADS // 2)


_ROPE_HEAD_DIM = 8
_EXPANSIONS = ("expand", "mamba_expand")
_INNER_SIZE = "mamba_d_ssm"
_INNER_HEADS = (
    ("num_heads", "head_dim"),
    ("mamba_n_heads", "mamba_d_head"),
    ("n_mamba_heads", "mamba_headdim"),
    ("mamba_num_heads", "mamba_head_dim"),
)
"""Number of heads, and size of each."""
_INNER_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
"""Numbers of groups of such heads, which divide the number of heads."""
_NAMES_AND_RULES: tuple[tuple[str, Callable[[_Sizes, int], int]], ...] = (
    (
        r"num_attention_heads\w*|n_heads?|num_heads|attention_heads|\w+coder_attention_heads|swa_num_attention_heads",
        lambda sizes, value: _HEADS,
    ),
    (r"\w*num_(key_value|kv)_heads\w*|kv_n_heads", lambda sizes, value: sizes.kv_heads(value)),
    (r"head_dim|\w*_head_dim_\w*|global_head_dim|swa_head_dim|kv_channels", lambda sizes, value: sizes.dims(value)),
    (r"linear_num_(key|value)_heads", lambda sizes, value: sizes.linear_heads(value)),
    (r"query_pre_attn_scalar", lambda sizes, value: sizes.head_dim),
    (r"qk_rope_head_dim|qk_nope_head_dim", lambda sizes, value: _ROPE_HEAD_DIM),
    (r"qk_head_dim", lambda sizes, value: 2 * _ROPE_HEAD_DIM),
    (r"\w*v_head_dim", lambda sizes, value: 12),
    (r"rotary_dim", lambda sizes, value: sizes.head_dim // 2),
    (r"\w*vocab(_size\w*)?", lambda sizes, value: min(value, VOCAB_SIZE)),
    (r"\w*(intermediate|ffn|feed_forward|dff|dim_ff|d_inner)\w*", lambda sizes, value: min(value, 96)),
    (r"\w*experts_per_tok\w*|moe_topk|moe_k|\w*top_?k_experts", lambda sizes, value: min(value, 2)),
    (r"num_\w*experts|n_routed_experts|moe_num_experts|zero_expert_num", lambda sizes, value: min(value, 8)),
    # Exact buckets end below THRESHOLD.
    (r"\w*num_buckets", lambda sizes, value: min(value, THRESHOLD)),
    (r"n_group|num_expert_group", lambda sizes, value: min(value, 2)),
    (r"topk_group", lambda sizes, value: 1),
    (
        r"first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_\w+_index",
        lambda sizes, value: min(value, 1),
    ),
)
_RULES = [(re.compile(names), rule) for names, rule in _NAMES_AND_RULES]
