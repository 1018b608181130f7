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
        self.num_sequence_tokens = 0
        """Tokens of live sequences, shared prefixes counted for each of them."""


class Account:
    """What one session has of the budget. `close` gives it back as a whole; from then on nothing counts any more."""

    def __init__(self, budget: Budget, block_size: int) -> None:
        self.block_size = block_size
        self.budget = budget
        self.num_blocks = 0
        self.num_sequence_tokens = 0
        self.is_closed = False

    @property
    def blocks_left(self) -> int:
        """Further blocks that may be granted for the first time."""
        budget = self.budget
        slots_left = budget.max_tokens - budget.num_slots
        return min(budget.max_blocks - budget.num_blocks, slots_left // self.block_size)

    @property
    def tokens_left(self) -> int:
        """Further tokens that live sequences may have."""
        return self.budget.max_tokens - self.budget.num_sequence_tokens

    @property
    def most_blocks(self) -> int:
        """Blocks that the session could be granted if it were the only one."""
        return min(self.budget.max_blocks, self.budget.max_tokens // self.block_size)

    def add_blocks(self, count: int) -> None:
        """So many blocks are granted for the first time; the caller has checked `blocks_left`."""
        if not self.is_closed:
            self.num_blocks += count
            self.budget.num_blocks += count
            self.budget.num_slots += count * self.block_size

    def add_tokens(self, count: int) -> None:
        """A live sequence keeps so many more tokens, or (count < 0) has ended; the caller has checked `tokens_left`."""
        if not self.is_closed:
            self.num_sequence_tokens += count
            self.budget.num_sequence_tokens += count

    def close(self) -> None:
        """The session is over. Idempotent."""
        self.add_blocks(-self.num_blocks)
        self.add_tokens(-self.num_sequence_tokens)
        self.is_closed = True

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
