"""A sequence of the worker's cache side: its block tables, and how much of them the manager has acknowledged."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from kvpool.v1 import common_pb2

from .ledger import Content
from .reserve import SpareBlock
from .running_state import RunningState, StateUse
from .scratch import Scratch


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
        self.cross_group: int | None = None
        """Index of the group with cross attention, once it has a table there."""
        self.encoder_computed = False
        """Whether the KV of the encoder's input is complete, cached or computed by the step that computed the sequence's first
        tokens."""
        self.encoder_cached = False
        """Whether that KV was served from the cache in the current round."""
        self.encoder_acked = False
        """Whether the manager has acknowledged that it is complete."""
        self.level = 0
        """Priority level; smaller comes first."""
        self.state = SequenceState.WAITING
        self.tables: tuple[list[int], ...] = ()
        """Block ids of each group, from position 0; empty while it holds nothing. Tables of groups that keep everything have the
        same length. With a window the table is the ring's, and 0 where nothing is kept; with a state it is empty; with cross
        attention its blocks hold the KV of the encoder's input."""
        self.generations: tuple[list[int], ...] = ()
        """Generation of each entry of the tables, in groups that keep everything."""
        self.scratch: tuple[Scratch | None, ...] = ()
        """The scratch in each group, None in those that keep everything; empty if all do."""
        self.num_entries = 0
        """Length of its tables in groups that keep everything."""
        self.boundaries: tuple[int, ...] = ()
        """Positions, in tokens and ascending, at which its windows and states are to be named once it has computed so far."""
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
        """A fork that cannot be stated to the manager, because a larger attempt of it or of its parent runs elsewhere."""
        self.maybe_granted = False
        """An Allocate or a Fork of this round was sent and not refused: the manager may hold blocks for it."""
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
            f"tokens={len(self.tokens)} computed={self.num_computed_tokens} tables={self.tables} scratch={self.scratch}>"
        )

    @property
    def block_tables(self) -> tuple[list[int], ...]:
        """Tables of the groups whose layers attend to the sequence itself."""
        tables = self.tables if self._state is None else self.tables[:-1]
        if self.cross_group is not None:
            return (*tables[: self.cross_group], *tables[self.cross_group + 1 :])
        return tables

    @property
    def unit_table(self) -> list[int] | None:
        """The blocks with the KV of the encoder's input; None without cross attention."""
        return None if self.cross_group is None else self.tables[self.cross_group]

    @property
    def _state(self) -> RunningState | None:
        last = self.scratch[-1] if self.scratch else None
        return last if isinstance(last, RunningState) else None

    def state_use(self, num_slots: int) -> StateUse | None:
        """The state's blocks in the step up to `num_slots` tokens for which the sequence was extended; None: there are no recurrent
        layers."""
        state = self._state
        return None if state is None else state.use(self.num_computed_tokens, num_slots)

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
        """Whether there is something to state of its windows and state, or of its encoder."""
        return self.has_encoder_news or any(scratch is not None and scratch.has_news for scratch in self.scratch)

    @property
    def has_encoder_news(self) -> bool:
        """Whether a call must state that the KV of the encoder's input is complete."""
        return self.encoder_computed and not self.encoder_acked

    @property
    def num_tokens_to_encode(self) -> int:
        """Tokens of the encoder's input, if the encoder is to run with the next tokens of the sequence."""
        return 0 if self.encoder_computed else self.num_encoder_tokens

    def num_blocks(self, block_size: int) -> int:
        """Blocks of each group that keeps everything that its tokens occupy."""
        return -(-len(self.tokens) // block_size)

    def most_blocks(self, block_size: int) -> int:
        """Blocks of tokens that it can have in the end."""
        return -(-(self.max_tokens - 1) // block_size)

    def num_blocks_to_come(self, block_size: int) -> int:
        """Blocks of each group that keeps everything that the sequence can still need beyond its tables."""
        return max(0, self.most_blocks(block_size) - self.num_entries)

    def blocks(self, group: int) -> Iterable[int]:
        """All blocks of a group that this worker uses for it, in the order in which its pool may evict them."""
        scratch = self.scratch[group] if self.scratch else None
        return reversed(self.tables[group]) if scratch is None else scratch.blocks()

    def own_blocks(self, group: int) -> list[SpareBlock]:
        """The blocks of a group that a fork does not share with its parent. The manager must not know the fork."""
        scratch = self.scratch[group] if self.scratch else None
        if scratch is not None:
            return scratch.from_reserve
        if group == self.cross_group:
            return []
        first = self.acked_entries
        return list(map(SpareBlock, self.tables[group][first:], self.generations[group][first:]))

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
        self.tables = self.generations = self.scratch = ()
        self.num_entries = 0
        self.boundaries = ()
        self.content = None
        self.num_cached_tokens = self.num_computed_tokens = 0
        self.uses_blocks = self.maybe_granted = False
        self.encoder_computed = self.encoder_cached = self.encoder_acked = False
        self.cross_group = None
        self.acked_tokens = self.acked_entries = self.acked_computed_tokens = 0
        self.parked_on = None
