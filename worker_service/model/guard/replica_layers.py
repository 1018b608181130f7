"""Which layers of a model its tiny replica keeps: one of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from transformers import PreTrainedConfig


def num_layers(fields: dict[str, Any]) -> int:
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"):
        if isinstance(fields.get(name), int):
            return int(fields[name])
    return 0


def derived_kinds(config: Any, fields: dict[str, Any]) -> list[str]:
    """The kind of each layer by lists that the config's class derives from a period, or from others of its fields; empty if all
    layers are alike by these, or the fields have the same lists."""
    count, cls = num_layers(fields), type(config)
    # Those of all configs are about other things, and reading some of them prints a warning.
    names = (name for name in sorted(set(dir(cls)) - set(dir(PreTrainedConfig))) if name not in fields)
    names = (name for name in names if isinstance(getattr(cls, name, None), property))
    found = [value for name in names if isinstance(value := getattr(config, name, None), list) and len(value) == count]
    stated = [value for value in fields.values() if isinstance(value, list) and len(value) == count]
    kinds = [str(entries) for entries in zip(*(value for value in found if value not in stated), strict=True)]
    return kinds if len(set(kinds)) > 1 else []


def kept_layers(fields: dict[str, Any], derived: Sequence[str] = ()) -> list[int]:
    """The first layer of each kind, at least two; a kind is the combination of all per-layer lists' entries.

    derived: see derived_kinds. Such layers cannot be chosen: all are kept up to the last one that is the first of its kind.
    """
    count = num_layers(fields)
    if derived:
        return list(range(max(derived.index(kind) for kind in set(derived)) + 1))
    per_layer = [value for value in fields.values() if isinstance(value, list) and len(value) == count]
    ascending = [value for value in fields.values() if isinstance(value, list) and is_indices(value, count)]
    first_shared = count - (fields.get("num_kv_shared_layers") or 0)
    overrides = fields.get("per_layer_config") or {}
    by_layer = {int(index): str(override) for index, override in overrides.items()}
    first_of: dict[str, int] = {}
    seconds: dict[str, int] = {}
    for index in range(count):
        kind = [str(value[index]) for value in per_layer if not is_indices(value, count)]
        kind += [str(index in value) for value in ascending] + [by_layer.get(index, "")]
        key = str((kind, index >= first_shared))
        # Layers that attend and have a state may share weights with each other: two of them show it.
        if first_of.setdefault(key, index) != index and "hybrid" in key:
            seconds.setdefault(key, index)
    kept = sorted([*first_of.values(), *seconds.values()])
    return kept if len(kept) > 1 or count < 2 else [*kept, count - 1]


def is_indices(value: Sequence[Any], count: int) -> bool:
    """Whether a list consists of layer indices, not of one entry per layer."""
    return (
        bool(value)
        and all(isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < count for entry in value)
        and all(before < after for before, after in pairwise(value))
    )
