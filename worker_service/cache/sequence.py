"""A sequence of the worker's cache side: its block tables, and how much of them the manager has acknowledged."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvpool.v1 import common_pb2


class SequenceState(Enum):
    """State of a sequence between the engine and the manager."""

    WAITING = "waiting"
    """Holds nothing; may be a candidate for the next Allocate."""
    PARKED = "parked"
    """Holds nothing; another sequence is computing its prefix."""
    ALLOCATING = "allocating"
    """Named in an Allocate that is in flight."""
    LIVE = "live"
    """Has a block table."""
    ENDING = "ending"
    """The engine is done with it; waits for its running step or for the reply to Free."""
    ENDED = "ended"
    """Holds nothing, here or at the manager."""


class SequenceId(NamedTuple):
    """Identifies a live sequence on a worker; its round is state."""

    sequence_id: str
    attempt: int


class CacheSequence:
    """One (sequence_id, attempt) of the engine, in its current round.

    The engine reads `state`, `tables`, `num_cached_tokens` and `num_computed_tokens`; only EngineCache writes.
    """

    def __init__(
        self,
        sequence_id: str,
        attempt: int,
        root: common_pb2.Root,
        tokens: list[int],
        *,
        max_new_tokens: int,
        max_cached_tokens: int | None = None,
        no_wait: bool = False,
    ) -> None:
        self.id = SequenceId(sequence_id, attempt)
        self.round = 0
        self.root = root
        self.tokens = list(tokens)
        """Prompt and generated tokens."""
        self.max_tokens = len(tokens) + max_new_tokens
        """Length at which the engine stops; the KV of the last token is never computed."""
        self.max_cached_tokens = max_cached_tokens
        self.no_wait = no_wait
        self.level = 0
        """Priority level; smaller comes first."""
        self.state = SequenceState.WAITING
        self.tables: tuple[list[int], ...] = ()
        """By group: block ids, from position 0. All have the same length; empty while it holds nothing."""
        self.generations: tuple[list[int], ...] = ()
        """Generation of each entry of the tables."""
        self.num_cached_tokens = 0
        """Tokens that the cache served in the current round."""
        self.num_computed_tokens = 0
        """Tokens whose KV is complete; a running step does not count."""
        self.uses_blocks = False
        """This worker may read or write the blocks of the table."""
        self.in_step = False
        """The running step uses its blocks."""
        self.maybe_granted = False
        """An Allocate of this round was sent and not refused: the manager may hold blocks for it."""
        self.acked_tokens = 0
        """Tokens that the manager has acknowledged."""
        self.acked_entries = 0
        """Entries of each table that it has acknowledged."""
        self.acked_computed_tokens = 0
        self.parked_on: SequenceId | None = None
        self.parked_position = 0
        self.parked_at = 0.0
        self.progress_at = 0.0
        """When tokens were last computed, or acknowledged as computed."""

    def __repr__(self) -> str:
        return (
            f"<CacheSequence {self.id.sequence_id!r} attempt={self.id.attempt} round={self.round} {self.state.value} "
            f"tokens={len(self.tokens)} computed={self.num_computed_tokens} tables={self.tables}>"
        )

    @property
    def key(self) -> common_pb2.SequenceKey:
        """The protocol's key, with the current round."""
        return common_pb2.SequenceKey(sequence_id=self.id.sequence_id, attempt=self.id.attempt, round=self.round)

    @property
    def num_entries(self) -> int:
        """Length of its tables."""
        return len(self.tables[0]) if self.tables else 0

    def num_blocks(self, block_size: int) -> int:
        """Blocks of each group that its tokens occupy."""
        return -(-len(self.tokens) // block_size)

    def num_blocks_to_come(self, block_size: int) -> int:
        """Blocks of each group that the sequence can still need beyond its tables."""
        return max(0, -(-(self.max_tokens - 1) // block_size) - self.num_entries)

    def next_round(self) -> CacheSequence:
        """The same request with its generated tokens, holding nothing."""
        again = CacheSequence(
            self.id.sequence_id,
            self.id.attempt,
            self.root,
            self.tokens,
            max_new_tokens=self.max_tokens - len(self.tokens),
            max_cached_tokens=self.max_cached_tokens,
            no_wait=self.no_wait,
        )
        again.round = self.round + 1
        again.level = self.level
        return again

    def forget(self) -> None:
        """Reset table, progress and acknowledgements."""
        self.tables = self.generations = ()
        self.num_cached_tokens = self.num_computed_tokens = 0
        self.uses_blocks = self.maybe_granted = False
        self.acked_tokens = self.acked_entries = self.acked_computed_tokens = 0
        self.parked_on = None
