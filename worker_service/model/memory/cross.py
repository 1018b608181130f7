"""How many blocks the cross group of an encoder-decoder model gets: the KV of encoders' outputs.

A sequence needs the blocks of its input for as long as it runs, however long its text is. So the group gets what --max-num-seqs
of the longest inputs need; where that is more than half of the memory, as many as fit into half.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..forward.kv_plan import CrossPlan, KVCachePlan
from .split import Split


class CrossNeeds(NamedTuple):
    """The cross group before its size is known."""

    bytes_per_token: int
    """K and V of its layers."""
    max_tokens: int
    """Tokens of the encoder's longest input."""


def size_cross(
    needs: CrossNeeds,
    block_size: int,
    max_num_seqs: int,
    cross_blocks: int | None = None,
    num_bytes: int | None = None,
) -> CrossPlan:
    """Plan the cross group. cross_blocks: the setting, the null block included; None: by need. num_bytes: size of the whole cache;
    None: it is given in blocks."""
    blocks_per_input = -(-needs.max_tokens // block_size)
    if cross_blocks is None:
        num_inputs = max_num_seqs
        if num_bytes is not None:
            num_inputs = max(
                1, min(num_inputs, num_bytes // 2 // (blocks_per_input * block_size * needs.bytes_per_token))
            )
        cross_blocks = num_inputs * blocks_per_input + 1
    return CrossPlan(cross_blocks, needs.bytes_per_token, needs.max_tokens)


class SplitWithCross(NamedTuple):
    """A Split of what the cross group leaves to the others."""

    split: Split
    needs: CrossNeeds | None
    """None: the model has no encoder."""
    block_size: int
    max_num_seqs: int
    cross_blocks: int | None

    def of_blocks(self, num_blocks: int) -> KVCachePlan:
        """See Split; the cross group gets its blocks in addition."""
        return replace(self.split.of_blocks(num_blocks), cross=self._size(None))

    def of_bytes(self, num_bytes: int, workspace_per_token: int = 0) -> KVCachePlan:
        """See Split."""
        cross = self._size(num_bytes)
        left = num_bytes if cross is None else num_bytes - cross.total_bytes(self.block_size)
        return replace(self.split.of_bytes(left, workspace_per_token), cross=cross)

    def _size(self, num_bytes: int | None) -> CrossPlan | None:
        if self.needs is None:
            return None
        return size_cross(self.needs, self.block_size, self.max_num_seqs, self.cross_blocks, num_bytes)
