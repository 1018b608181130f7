"""A sequence of the worker's cache side: its block tables, and how much of them the manager has acknowledged."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from kvpool.v1 import common_pb2

from .entry import StateBlocks
from .groups.group import GroupTable
from .groups.scratch import Scratch
from .ledger import Content


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
        kept: tuple[int, ...] = (),
        num_encoder_tokens: int = 0,
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
        self.kept = kept
        """Lengths of the prompt, in tokens, at which the request asks for boundaries."""
        self.num_encoder_tokens = num_encoder_tokens
        """Tokens of the encoder's input, which the root names by its digest; 0: there is none."""
        self.level = 0
        """Priority level; smaller comes first."""
        self.state = SequenceState.WAITING
        self.group_tables: tuple[GroupTable, ...] = ()
        """What it has in each group; empty while it holds nothing."""
        self.tables: tuple[list[int], ...] = ()
        """Block ids of each group, from position 0, 0 where nothing is kept."""
        self.block_tables: tuple[list[int], ...] = ()
        """Tables of the groups whose layers attend to the sequence itself."""
        self.num_entries = 0
        """Length of its tables in groups that keep everything."""
        self.boundaries: tuple[int, ...] = ()
        """Positions, in tokens and ascending, where what it has is to be named once it has computed so far."""
        self.content: Content | None = None
        """What its last complete block holds."""
        self.num_cached_tokens = 0
        """Tokens that the cache served in the current round."""
        self.num_computed_tokens = 0
        """Tokens whose KV is complete; a running step does not count."""
        self.uses_blocks = False
        """Whether this worker may read or write the blocks of the table."""
        self.in_step = False
        """Whether the running step uses its blocks."""
        self.num_copies = 0
        """Forks for which the running or the next step copies blocks of this one, or to it."""
        self.num_forks_to_come = 0
        """Forks that the engine is going to make of it: the reserve gets blocks for each. Set by the engine; each fork takes one
        off."""
        self.parent: CacheSequence | None = None
        """The sequence whose fork it is, as long as the manager does not know of the fork."""
        self.lacks_copies = False
        """A fork that ended before a step had made its copies: what it does not share is not there."""
        self.is_superseded = False
        """It cannot be stated to the manager any more, because a larger attempt of it or of its parent runs elsewhere."""
        self.maybe_granted = False
        """An Allocate or a Fork of this round was sent and not refused: the manager may hold blocks for it."""
        self.acked_tokens = 0
        """Tokens that the manager has acknowledged."""
        self.acked_computed_tokens = 0
        self.parked_on: SequenceId | None = None
        self.parked_position = 0
        self.parked_at = 0.0
        self.progress_at = 0.0
        """When tokens were last computed, or acknowledged as computed."""

    def __repr__(self) -> str:
        return (
            f"<CacheSequence {self.id.sequence_id!r} attempt={self.id.attempt} round={self.round} {self.state.value} "
            f"tokens={len(self.tokens)} computed={self.num_computed_tokens} tables={self.group_tables}>"
        )

    def take(self, tables: Iterable[GroupTable]) -> None:
        """Enter what it has in each group, in order. It is used from now on."""
        self.group_tables = tuple(tables)
        self.tables = tuple([table.table for table in self.group_tables])
        self.block_tables = tuple([table.table for table in self.group_tables if table.is_attended])
        self.num_entries = max([len(table.table) for table in self.group_tables if table.grows], default=0)
        self.uses_blocks = True

    def scratches(self) -> list[tuple[int, Scratch]]:
        """The groups that keep boundaries, and what it has there."""
        return [(group, table) for group, table in enumerate(self.group_tables) if isinstance(table, Scratch)]

    @property
    def unit(self) -> GroupTable | None:
        """What it has in the group with the KV of the encoder's input; None: there is no encoder."""
        return next((table for table in self.group_tables if table.is_encoder), None)

    def state_use(self, num_slots: int) -> StateBlocks | None:
        """The state's blocks in the step up to `num_slots` tokens for which the sequence was extended; None: there are no recurrent
        layers."""
        uses = (table.state_use(self.num_computed_tokens, num_slots) for table in self.group_tables)
        return next((use for use in uses if use is not None), None)

    @property
    def key(self) -> common_pb2.SequenceKey:
        """The protocol's key, with the current round."""
        return common_pb2.SequenceKey(sequence_id=self.id.sequence_id, attempt=self.id.attempt, round=self.round)

    @property
    def is_busy(self) -> bool:
        """Whether a step uses its blocks, or is about to copy to or from them."""
        return self.in_step or self.num_copies > 0

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is not complete, those of the encoder's input included; one while it decodes."""
        return len(self.tokens) - self.num_computed_tokens + self.num_tokens_to_encode

    @property
    def has_news(self) -> bool:
        """Whether there is something to state that its progress does not show."""
        return any(table.has_news for table in self.group_tables)

    @property
    def has_encoder_news(self) -> bool:
        """Whether a call must state that the KV of the encoder's input is complete."""
        return self.num_encoder_tokens > 0 and any(table.has_news for table in self.group_tables if table.is_encoder)

    @property
    def num_tokens_to_encode(self) -> int:
        """Tokens of the encoder's input, if the encoder is to run with the next tokens of the sequence."""
        if not (self.num_encoder_tokens and self.group_tables):
            return self.num_encoder_tokens
        return sum([table.num_tokens_to_encode for table in self.group_tables])

    @property
    def encoder_computed(self) -> bool:
        """Whether the KV of the encoder's input is complete."""
        return self.num_encoder_tokens > 0 and not self.num_tokens_to_encode

    @property
    def encoder_cached(self) -> bool:
        """Whether the KV of the encoder's input was served from the cache in the current round."""
        return self.unit is not None and self.unit.was_encoded

    def num_blocks(self, block_size: int) -> int:
        """Blocks of each group that keeps everything that its tokens occupy."""
        return -(-len(self.tokens) // block_size)

    def most_blocks(self, block_size: int) -> int:
        """Blocks of tokens that it can have in the end."""
        return -(-(self.max_tokens - 1) // block_size)

    def num_blocks_to_come(self, block_size: int) -> int:
        """Blocks of each group that keeps everything that the sequence can still need beyond its tables."""
        return max(0, self.most_blocks(block_size) - self.num_entries)

    def alone(self, sequence_id: str, tokens: list[int] | None = None) -> CacheSequence:
        """Another sequence that begins with these tokens, None: all that this one has, holding nothing."""
        tokens = self.tokens if tokens is None else tokens
        again = CacheSequence(
            sequence_id,
            self.id.attempt,
            self.root,
            tokens,
            max_new_tokens=self.max_tokens - len(tokens),
            max_cached_tokens=self.max_cached_tokens,
            no_wait=self.no_wait,
            kept=self.kept,
            num_encoder_tokens=self.num_encoder_tokens,
        )
        again.level = self.level
        return again

    def next_round(self) -> CacheSequence:
        """The same request with its generated tokens, holding nothing."""
        again = self.alone(self.id.sequence_id)
        again.round = self.round + 1
        return again

    def forget(self) -> None:
        """Reset table, progress and acknowledgements."""
        self.group_tables = ()
        self.tables = self.block_tables = ()
        self.num_entries = 0
        self.boundaries = ()
        self.content = None
        self.num_cached_tokens = self.num_computed_tokens = 0
        self.uses_blocks = self.maybe_granted = False
        self.acked_tokens = self.acked_computed_tokens = 0
        self.parked_on = None
