"""How the memory of a KV cache is split between the pools of its groups.

A group with a window needs the same few blocks for each sequence, however long its text is: a ring, and room for two windows that
are kept for others. So it gets what --max-num-seqs sequences need, and the groups without a window get the rest, because their
blocks bound the text that can be held. Where that would leave them less than half, windows are made for fewer sequences. A group
with a window never has more blocks than one without: they would be of no use.

The states of recurrent layers are such a need, too: of the same size after any number of tokens. Only in a model without attention
they get everything.

So is the KV of an encoder's outputs: a sequence needs the blocks of its input for as long as it runs, however long its text is. The
cross group gets what --max-num-seqs of the longest inputs need; where that is more than half of the memory, as many as fit into
half. The other groups share what it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...cache.groups.state import SCRATCH_BLOCKS, grid_tokens
from ...cache.groups.window import largest_chunk, ring_blocks, span
from ..forward.kv_plan import CrossPlan, GroupPlan, KVCachePlan, StatesPlan
from ..settings import MemorySettings

KEPT_WINDOWS = 2
"""Windows kept for others, for each sequence: at the end of its prompt, and at the end of its text."""


KEPT_STATES = 2
"""States kept for others, for each sequence: at the end of its prompt, and at the end of its text."""


class Split:
    """Splits blocks or bytes between groups, whose plans have no number of blocks yet.

    states: its number of blocks may be set; None: no layer is recurrent. cross: None: the model has no encoder.
    """

    def __init__(
        self,
        groups: Sequence[GroupPlan],
        settings: MemorySettings,
        states: StatesPlan | None = None,
        cross: CrossPlan | None = None,
    ) -> None:
        self._groups, self._states, self._cross = groups, states, cross
        self._settings, self._block_size = settings, settings.block_size
        windows = [group.window for group in groups if group.window is not None]
        self._chunk = largest_chunk(windows, settings.max_num_batched_tokens) if windows else None
        self._each = [self._blocks_per_sequence(group) for group in groups]
        """Blocks of one sequence, in groups with a window."""
        self._full_cost = self._block_size * sum(group.bytes_per_token for group in groups if group.window is None)
        """Bytes of one block in every group without a window together."""

    def of_blocks(self, num_blocks: int) -> KVCachePlan:
        """Groups without a window get so many blocks, the null block included; without such groups all of them, and in a model
        without attention the states, unless their number is set. The cross group gets its blocks in addition."""
        return replace(self._of_blocks(num_blocks), cross=self._size_cross(None))

    def _of_blocks(self, num_blocks: int) -> KVCachePlan:
        has_own_number = bool(self._groups) or (self._states is not None and self._states.num_blocks > 0)
        num_states = self._of_states(self._settings.max_num_seqs) if has_own_number else num_blocks
        if not self._full_cost:
            return self._plan([self._settings.window_blocks or num_blocks for _ in self._groups], num_states)
        return self._plan(
            [
                num_blocks if group.window is None else self._of_window(each, self._settings.max_num_seqs, num_blocks)
                for group, each in zip(self._groups, self._each, strict=True)
            ],
            num_states,
        )

    def of_bytes(self, num_bytes: int, workspace_per_token: int = 0) -> KVCachePlan:
        """The largest cache of at most so many bytes, with attention's workspace for each token that it holds; its groups may have
        too few blocks to be of use."""
        cross = self._size_cross(num_bytes)
        left = num_bytes if cross is None else num_bytes - cross.total_bytes(self._block_size)
        return replace(self._of_bytes(left, workspace_per_token), cross=cross)

    def _size_cross(self, num_bytes: int | None) -> CrossPlan | None:
        """The cross group with its number of blocks. num_bytes: size of the whole cache; None: it is given in blocks."""
        cross, num_inputs = self._cross, self._settings.max_num_seqs
        if cross is None:
            return None
        if self._settings.cross_blocks is not None:
            return replace(cross, num_blocks=self._settings.cross_blocks)
        blocks_per_input = cross.blocks_per_input(self._block_size)
        if num_bytes is not None:
            bytes_per_input = blocks_per_input * self._block_size * cross.bytes_per_token
            num_inputs = max(1, min(num_inputs, num_bytes // 2 // bytes_per_input))
        return replace(cross, num_blocks=num_inputs * blocks_per_input + 1)

    def _of_bytes(self, num_bytes: int, workspace_per_token: int) -> KVCachePlan:
        workspace = self._block_size * workspace_per_token
        if not self._groups:
            assert self._states is not None, "a model has layers"
            return self._plan([], self._states.num_blocks or num_bytes // self._states.bytes_per_block)
        num_seqs = self._settings.max_num_seqs
        if not self._full_cost:
            while num_seqs > 1 and self._state_bytes(num_seqs) > num_bytes // 2:
                num_seqs -= 1
            return self._of_windows_only(num_bytes, workspace, num_seqs)
        while num_seqs > 1 and self._window_bytes(num_seqs) + self._state_bytes(num_seqs) > num_bytes // 2:
            num_seqs -= 1
        num_bytes -= self._state_bytes(num_seqs)
        num_full = (num_bytes - self._window_bytes(num_seqs)) // (self._full_cost + workspace)
        if self._settings.window_blocks is None:
            # With little memory as many in each group: more of a group with a window would never be used.
            cost_of_all = self._block_size * sum(group.bytes_per_token for group in self._groups)
            num_full = max(num_full, num_bytes // (cost_of_all + workspace))
        return self._plan(
            [
                num_full if group.window is None else self._of_window(each, num_seqs, num_full)
                for group, each in zip(self._groups, self._each, strict=True)
            ],
            self._of_states(num_seqs),
        )

    def _of_windows_only(self, num_bytes: int, workspace: int, num_sequences: int) -> KVCachePlan:
        if self._settings.window_blocks is not None:
            return self._plan([self._settings.window_blocks for _ in self._groups], self._of_states(num_sequences))
        num_bytes -= self._state_bytes(num_sequences)
        groups = zip(self._groups, self._each, strict=True)
        each = sum((self._block_size * group.bytes_per_token + workspace) * blocks for group, blocks in groups)
        return self._plan([num_bytes * blocks // each for blocks in self._each], self._of_states(num_sequences))

    def _of_states(self, num_sequences: int) -> int:
        """Blocks of states."""
        if self._states is None:
            return 0
        return self._states.num_blocks or num_sequences * (SCRATCH_BLOCKS + KEPT_STATES) + 1

    def _state_bytes(self, num_sequences: int) -> int:
        return 0 if self._states is None else self._of_states(num_sequences) * self._states.bytes_per_block

    def _of_window(self, each: int, num_sequences: int, most: int | None = None) -> int:
        """Blocks of a group with a window in which a sequence needs `each`."""
        if self._settings.window_blocks is not None:
            return self._settings.window_blocks
        num_blocks = num_sequences * each + 1
        return num_blocks if most is None else min(num_blocks, most)

    def _window_bytes(self, num_sequences: int) -> int:
        return self._block_size * sum(
            group.bytes_per_token * self._of_window(each, num_sequences)
            for group, each in zip(self._groups, self._each, strict=True)
            if group.window is not None
        )

    def _blocks_per_sequence(self, group: GroupPlan) -> int:
        if group.window is None or self._chunk is None:
            return 0
        grid = 1 if self._states is None else grid_tokens(self._block_size) // self._block_size
        ring = ring_blocks(group.window, self._chunk, self._block_size, grid)
        return ring + KEPT_WINDOWS * span(group.window, self._block_size)

    def _plan(self, num_blocks: Sequence[int], num_states: int) -> KVCachePlan:
        groups = (replace(group, num_blocks=count) for group, count in zip(self._groups, num_blocks, strict=True))
        states = None if self._states is None else replace(self._states, num_blocks=num_states)
        return KVCachePlan(self._block_size, tuple(groups), self._chunk, states)
