"""What all sessions together may make the manager keep: blocks once granted, their token slots, token ids of live sequences.

A declared pool costs nothing. A block counts from its first grant in a session until that session ends, whatever its state: that is
how long there is a record of it. As grants of new blocks come in ascending order, the blocks that count are those up to the highest
granted so far. A report counts alike what an earlier session was granted, and each content that it brings without a block.

So everything that grows is bounded: records of blocks, and nodes of the prefix tree, of which each has a block that counts or is
such a content, by `max_blocks`; their token ids by `max_tokens`; and again by `max_tokens` those that live sequences keep.
At the limit nothing breaks: pools stop growing and live on the blocks that they have, new sequences wait until others end.
"""

from __future__ import annotations

from .refusal import Reason, Refusal


class Budget:
    """Totals over all live sessions, and their limits. Changed by accounts alone."""

    def __init__(self, max_blocks: int, max_tokens: int) -> None:
        self.max_blocks = max_blocks
        self.max_tokens = max_tokens
        """Of token slots of the blocks, and again of tokens of live sequences."""
        self.num_blocks = 0
        self.num_slots = 0
        """Token slots of these blocks."""
        self.tokens_left = max_tokens
        """Further tokens that live sequences may have."""
        self.is_tight = False
        """Whether blocks could be withheld: not all that is declared would fit. Spares most managers the arithmetic."""
        self._num_declared_blocks = 0
        self._num_declared_slots = 0

    @property
    def num_sequence_tokens(self) -> int:
        """Tokens of live sequences, shared prefixes counted for each of them."""
        return self.max_tokens - self.tokens_left

    def declare(self, num_blocks: int, num_slots: int) -> None:
        """So many more blocks could be granted."""
        self._num_declared_blocks += num_blocks
        self._num_declared_slots += num_slots
        self.is_tight = self._num_declared_blocks > self.max_blocks or self._num_declared_slots > self.max_tokens


class Account:
    """What one session has of the budget. `close` gives it back as a whole; from then on nothing counts any more."""

    __slots__ = ("block_size", "budget", "most_blocks", "num_blocks", "num_declared", "num_sequence_tokens")

    def __init__(self, budget: Budget, block_size: int) -> None:
        self.block_size = block_size
        self.budget = budget
        self.num_blocks = 0
        self.num_declared = 0
        self.num_sequence_tokens = 0
        self.most_blocks = min(budget.max_blocks, budget.max_tokens // block_size)
        """Blocks that the session could be granted if it were the only one."""

    @property
    def blocks_left(self) -> int:
        """Further blocks that may be granted for the first time."""
        budget = self.budget
        slots_left = budget.max_tokens - budget.num_slots
        return min(budget.max_blocks - budget.num_blocks, slots_left // self.block_size)

    def declare(self, count: int) -> None:
        """So many further blocks may come to be granted."""
        self.num_declared += count
        self.budget.declare(count, count * self.block_size)

    def add_blocks(self, count: int) -> None:
        """So many blocks are granted for the first time; the caller has checked `blocks_left`."""
        self.num_blocks += count
        self.budget.num_blocks += count
        self.budget.num_slots += count * self.block_size

    def add_tokens(self, count: int) -> None:
        """A live sequence keeps so many more tokens, or (count < 0) has ended; the caller has checked `tokens_left`."""
        self.num_sequence_tokens += count
        self.budget.tokens_left -= count

    def close(self) -> None:
        """The session is over."""
        self.declare(-self.num_declared)
        self.add_blocks(-self.num_blocks)
        self.add_tokens(-self.num_sequence_tokens)
        # What the sweep takes off from now on is of no budget.
        self.budget = Budget(0, 0)

    def too_many_blocks(self, num_needed: int) -> Refusal:
        """The refusal where `num_needed` further blocks are more than `blocks_left`; names the limit that is reached."""
        budget = self.budget
        if budget.max_blocks - budget.num_blocks < num_needed:
            return Refusal(
                Reason.TOO_MANY_BLOCKS,
                f"needed {num_needed} blocks that were never granted before; the manager's workers have {budget.num_blocks} of "
                f"the {budget.max_blocks} that all of them may have: wait until sequences end, or raise --max-total-blocks of "
                "the manager",
            )
        return Refusal(
            Reason.TOO_MANY_TOKENS,
            f"needed {num_needed} blocks of {self.block_size} tokens that were never granted before; the blocks of the manager's "
            f"workers have room for {budget.num_slots} of the {budget.max_tokens} tokens that all of them may have: wait until "
            "sequences end, or raise --max-total-tokens of the manager",
        )

    def too_many_tokens(self, num_needed: int) -> Refusal:
        """The refusal where `num_needed` further tokens of a sequence are more than `tokens_left`."""
        budget = self.budget
        return Refusal(
            Reason.TOO_MANY_TOKENS,
            f"needed {num_needed} more tokens; the live sequences of all workers have {budget.num_sequence_tokens} of the "
            f"{budget.max_tokens} that the manager keeps: wait until sequences end, or raise --max-total-tokens of the manager",
        )
