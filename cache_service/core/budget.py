"""The budget of all sessions together: blocks once granted, their token slots, token ids of live sequences.

A declared pool costs nothing. A block counts from its first grant in a session until that session ends, in any state: as long as
there is a record of it. New blocks are granted in ascending order, so the blocks that count are those up to the highest granted.
A report counts in the same way what an earlier session was granted, and each content that it has without a block.

So everything that grows is bounded: block records, and prefix tree nodes, each of which has a block that counts or is such a
content, by `max_blocks`; their token ids by `max_tokens`; the token ids of live sequences again by `max_tokens`. At the limit pools
stop growing and reuse the blocks that they have; new sequences wait until others end.
"""

from __future__ import annotations

from .refusal import Reason, Refusal


class Budget:
    """Totals over all live sessions, and their limits. Changed by accounts alone."""

    def __init__(self, max_blocks: int, max_tokens: int) -> None:
        self.max_blocks = max_blocks
        self.max_tokens = max_tokens
        """The limit on the token slots of all blocks, and on its own the limit on the tokens of all live sequences."""
        self.num_blocks = 0
        self.num_slots = 0
        """Token slots of these blocks."""
        self.tokens_left = max_tokens
        """Tokens that live sequences may have in addition."""
        self.is_tight = False
        """Whether blocks may be withheld, because the declared pools exceed the budget. Spares most managers the arithmetic."""
        self._num_declared_blocks = 0
        self._num_declared_slots = 0

    @property
    def num_sequence_tokens(self) -> int:
        """Tokens of live sequences, shared prefixes counted for each of them."""
        return self.max_tokens - self.tokens_left

    def declare(self, num_blocks: int, num_slots: int) -> None:
        """Pools were declared that could be granted this much."""
        self._num_declared_blocks += num_blocks
        self._num_declared_slots += num_slots
        self.is_tight = self._num_declared_blocks > self.max_blocks or self._num_declared_slots > self.max_tokens


class Account:
    """One session's part of the budget. `close` gives all of it back; after that nothing counts."""

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
        """Blocks that may still be granted for the first time."""
        budget = self.budget
        slots_left = budget.max_tokens - budget.num_slots
        return min(budget.max_blocks - budget.num_blocks, slots_left // self.block_size)

    def declare(self, count: int) -> None:
        """`count` blocks could be granted in addition."""
        self.num_declared += count
        self.budget.declare(count, count * self.block_size)

    def add_blocks(self, count: int) -> None:
        """`count` blocks are granted for the first time; the caller has checked `blocks_left`."""
        self.num_blocks += count
        self.budget.num_blocks += count
        self.budget.num_slots += count * self.block_size

    def add_tokens(self, count: int) -> None:
        """A live sequence has `count` more tokens, or (count < 0) has ended; see `require_tokens`."""
        self.num_sequence_tokens += count
        self.budget.tokens_left -= count

    def close(self) -> None:
        """The session is over."""
        self.declare(-self.num_declared)
        self.add_blocks(-self.num_blocks)
        self.add_tokens(-self.num_sequence_tokens)
        # What the sweep releases later counts in no budget.
        self.budget = Budget(0, 0)

    def too_many_blocks(self, num_needed: int) -> Refusal:
        """The refusal where `num_needed` new blocks are more than `blocks_left`; names the limit that is reached."""
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

    def require_tokens(self, num_needed: int) -> None:
        """Raise Refusal (TOO_MANY_TOKENS) if a live sequence may not have `num_needed` more tokens."""
        budget = self.budget
        if num_needed <= budget.tokens_left:
            return
        raise Refusal(
            Reason.TOO_MANY_TOKENS,
            f"needed {num_needed} more tokens; the live sequences of all workers have {budget.num_sequence_tokens} of the "
            f"{budget.max_tokens} that the manager keeps: wait until sequences end, or raise --max-total-tokens of the manager",
        )
