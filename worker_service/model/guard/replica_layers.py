"""Which layers of a model its tiny replica keeps: one of every kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

from transformers import PreTrainedConfig

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
