"""The interface of attention backends, and what one is selected for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .layer import AttentionCall, KVLayer, LayerNeeds
from .packing import Packing


class AttentionBackend(Protocol):
    """Reads and writes the paged KV of all layers. One step at a time, from one thread.

    Slots that no token of the step's sequences has written may hold any value, NaN included: a backend must keep them out of the
    arithmetic, even with weight 0. Only block 0, the null block, may be read as padding: it is zero. In a group with a window,
    blocks wholly before the window of a part's first token may be gone: their entries in the tables are not to be read.
    """

    def begin(self, packing: Packing) -> None:
        """Build the metadata of the next step, used by every attend until the next begin."""
        ...

    def attend(
        self, layer: KVLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Write the new K and V to their slots, then attend causally over each sequence's blocks; in a cross layer write
        nothing, and attend to all of each sequence's encoder.

        query [1, Hq, ΣT, Dk], key [1, Hkv, ΣT, Dk], value [1, Hkv, ΣT, Dv]; returns contiguous [1, ΣT, Hq, Dv].
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A model on a device."""

    needs: tuple[LayerNeeds, ...]
    """The distinct needs of its layers."""
    dtype: torch.dtype
    device: torch.device
    block_size: int
