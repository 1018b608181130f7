"""Groups of attention layers: layers of a group keep the KV of the same tokens, and so have their blocks in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .layers import AttentionLayer


class LayerGroup(NamedTuple):
    """Layers that have their blocks in common."""

    window: int | None
    """Tokens that they see at most; None: full attention."""
    layers: tuple[int, ...]
    """Indices of the layers that store KV in them."""


def sights(layers: Sequence[AttentionLayer]) -> list[int | None]:
    """The window of each layer's KV in tokens: the widest window of the layers that read it; None: one of them sees everything. A
    layer that reads another one's KV gets the window of that KV."""
    widest: dict[int, int | None] = {}
    for index, layer in enumerate(layers):
        stored = index if layer.source is None else layer.source
        current = widest.get(stored, 0)
        widest[stored] = None if current is None or layer.window is None else max(current, layer.window)
    return [widest[index if layer.source is None else layer.source] for index, layer in enumerate(layers)]


def groups_of(layers: Sequence[AttentionLayer], *, by_window: bool = True) -> tuple[LayerGroup, ...]:
    """The groups of a model: full attention first, if there is any, then one for each window, from the largest to the smallest.

    by_window: False puts all layers into one group that keeps everything. Layers that read the KV of another one store nothing, and
    are in no group; those of cross attention are in one of their own, after all others.
    """
    windows = [window if by_window else None for window in sights(layers)]
    storing = [index for index, layer in enumerate(layers) if layer.source is None and not layer.is_cross]
    distinct = {windows[index] for index in storing}
    full = [None] if None in distinct else []
    order = [*full, *sorted((window for window in distinct if window is not None), reverse=True)]
    return tuple(LayerGroup(window, tuple(index for index in storing if windows[index] == window)) for window in order)
