"""The worker's own book of its blocks: generation, users, and whether their KV is complete.

It stands guard over the rule of one writer: a grant is accepted only with a larger generation and only for a block that nothing
here still uses; a hit only for a block whose KV this process has completed under that very generation.
"""

from __future__ import annotations

from array import array


class DisagreementError(Exception):
    """The manager and this worker do not mean the same by a block. The session must be given up before anything is written."""


class BlockLedger:
    """Generations, table references and sealed flags of `num_blocks` blocks; block 0 is the null block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_used = 0
        """Blocks that at least one table names."""
        self._generation = array("Q", bytes(8 * num_blocks))
        self._num_users = array("I", bytes(4 * num_blocks))
        self._complete = bytearray(num_blocks)

    def accept_grant(self, block: int, generation: int) -> None:
        """A block is granted to this worker, empty. Raises DisagreementError."""
        self._check_range(block)
        if generation <= self._generation[block]:
            raise DisagreementError(
                f"block {block} was granted with generation {generation}, which is not larger than {self._generation[block]}"
            )
        if self._num_users[block]:
            raise DisagreementError(
                f"block {block} was granted (generation {generation}) while {self._num_users[block]} tables name it"
            )
        self._generation[block] = generation
        self._complete[block] = 0

    def accept_hit(self, block: int, generation: int) -> None:
        """A block is handed out as holding a prefix. Raises DisagreementError."""
        self._check_range(block)
        if generation != self._generation[block] or not self._complete[block]:
            raise DisagreementError(
                f"block {block} was handed out as cached with generation {generation}; here it has generation "
                f"{self._generation[block]} and its KV is {'complete' if self._complete[block] else 'not complete'}"
            )

    def use(self, block: int) -> None:
        """One more table names the block."""
        if not self._num_users[block]:
            self.num_used += 1
        self._num_users[block] += 1

    def drop(self, block: int) -> None:
        """One table less names it."""
        self._num_users[block] -= 1
        if not self._num_users[block]:
            self.num_used -= 1

    def complete(self, block: int) -> None:
        """All slots of the block hold their KV."""
        self._complete[block] = 1

    def _check_range(self, block: int) -> None:
        if not 0 < block < self.num_blocks:
            raise DisagreementError(f"block {block} does not exist: the pool has blocks 1 to {self.num_blocks - 1}")
