"""The cache side's state: blocks, reserve, sequences, and which calls are due. It outlives sessions; the link does not."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import NamedTuple

from . import boundaries, events
from .entry import BlockCopy
from .link_state import LinkState
from .report import Report
from .reserve import DecodingRate, Reserve, SpareBlock, spare_target
from .sequence import CacheSequence, SequenceId, SequenceState
from .settings import CacheSettings


class Copying(NamedTuple):
    """Copies that one step makes for a fork."""

    source: CacheSequence
    """The sequence whose blocks are read."""
    fork: CacheSequence
    copies: tuple[BlockCopy, ...]


class CacheState:
    """The state shared by the engine's methods (EngineCache), the next call and the replies."""

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self.link: LinkState | None = None
        """None while no session is open."""
        self.ledgers = tuple(group.ledger_type(group.num_blocks, index) for index, group in enumerate(settings.groups))
        """The ledger of each group; `reserves` has one for each group too."""
        self.reserves = tuple(Reserve() for _ in settings.groups)
        self.sequences: dict[SequenceId, CacheSequence] = {}
        """Live and ending sequences, and those the manager may hold blocks for."""
        self.ending: list[CacheSequence] = []
        """Sequences that the engine has freed; their Free is not answered yet."""
        self.forks: list[CacheSequence] = []
        """Forks that use blocks and that the manager does not know, oldest first: so each comes after its parent."""
        self.copies_due: list[Copying] = []
        """Copies for the forks since the last step began: the next step makes them."""
        self.copies_made: list[Copying] = []
        """Copies that the running step makes."""
        self.forks_retry_at = 0.0
        """The manager had no room for a fork: no other try before this time."""
        self.forks_found_no_room = False
        """Whether that was the manager's last answer about forks."""
        self.parked: list[CacheSequence] = []
        """Sequences that wait for a prefix that another one is computing."""
        self.rate = DecodingRate()
        self.report_due_at: float | None = None
        """When unreported filled blocks must be reported; None if there are none."""
        self.is_urgent = False
        """The next report must not wait."""
        self.ask_again_at = 0.0
        """The last Allocate found no blocks: no other before this time, unless blocks are freed."""
        self.waits_for_blocks = True
        """Whether blocks that are given back may change the manager's last refusal of an Allocate."""
        self.pool_is_empty = [False] * len(self.ledgers)
        """Whether the pool of each group was empty after the last reply, and the reserve smaller than wanted."""
        self.num_free: list[int] | None = None
        """Blocks that the manager can grant in each group without eviction, as of the last reply; None before the first of a
        session. Fewer than the blank blocks here if the budget of all workers is reached."""
        self.num_windows_named = 0
        """Windows and snapshots that were named, and so kept for others."""
        self.num_windows_not_named = 0
        """Windows and snapshots not named: there was no block to replace theirs, or none for the snapshot."""
        self.is_given_up = False
        """The blocks held here cannot be reported to the manager and must be forgotten: the engine has to end its streams and
        steps, then call `reset`."""
        self.events: list[events.Event] = []

    @property
    def holds_anything(self) -> bool:
        """Whether there is anything to report to a manager, and so the next session must start with a report."""
        return any(ledger.holds_anything for ledger in self.ledgers) or any(self.reserves)

    def begin_session(self, link: LinkState, *, report_wanted: bool) -> None:
        """A session is open. If the manager asked for a report, it is sent first: also an empty one, since the manager waits."""
        self._end_unheard()
        self.link = link
        for fork in self.forks:
            fork.maybe_granted = False
        self.forks_found_no_room, self.is_urgent = False, bool(self.forks)
        if report_wanted:
            # Forks that were not acknowledged are stated after the report, as they would have been before it.
            holders = [sequence for sequence in self.sequences.values() if sequence.tables and sequence.parent is None]
            # A report states the present, so what is not in it is released.
            for sequence in holders:
                for ledger, table in zip(self.ledgers, sequence.group_tables, strict=True):
                    for block in table.acknowledge_all():
                        ledger.drop(block)
            reserved = [
                [*reserve.spare(), *(block for fork in self.forks for block in fork.group_tables[group].from_reserve)]
                for group, reserve in enumerate(self.reserves)
            ]
            link.report = Report(self.ledgers, holders, reserved)

    def lose_session(self, why: str) -> None:
        """The session is over. Blocks stay, and sequences decode from the reserve; unanswered calls count as not executed."""
        if self.link is None:
            return
        self.link = None
        self.events.append(events.SessionLost(why))
        for sequence in list(self.sequences.values()):
            if sequence.state in (SequenceState.WAITING, SequenceState.ALLOCATING):
                self.let_go(sequence)
                sequence.forget()
                sequence.state = SequenceState.WAITING
                del self.sequences[sequence.id]
        self._end_unheard()
        for sequence in self.parked:
            sequence.parked_on = None
            sequence.state = SequenceState.WAITING
        self.parked = []
        for reserve in self.reserves:
            reserve.returning = []
        self.report_due_at, self.is_urgent = None, False
        self.ask_again_at, self.pool_is_empty = 0.0, [False] * len(self.ledgers)
        self.num_free = None

    def _end_unheard(self) -> None:
        """End freed sequences without a Free call: they will not be in the report. A sequence stays if a step still needs its
        blocks, or a fork that is stated after the report."""
        is_done = False
        while not is_done:  # what ends may be the last fork of another one
            is_done = True
            for sequence in list(self.ending):
                if not (sequence.is_busy or self.is_parent(sequence)):
                    self.ending.remove(sequence)
                    self.end(sequence)
                    is_done = False

    def is_parent(self, sequence: CacheSequence) -> bool:
        """Whether it has a fork that the manager does not know yet, and that uses its blocks."""
        return any(fork.parent is sequence for fork in self.forks)

    def give_up(self, why: str, *, is_defect: bool = True) -> None:
        """Give up all blocks held here, since none can be kept; the engine gets an event."""
        self.link = None
        if not self.is_given_up:
            self.is_given_up = True
            self.events.append(events.GivenUp(why, is_defect))

    def spare_targets(self, joining: List[CacheSequence] = ()) -> list[int]:
        """Blocks that the reserve of each group should hold for the live sequences, and for `joining` ones with tables for their
        tokens."""
        live = [sequence for sequence in self.sequences.values() if sequence.state is SequenceState.LIVE]
        size = self.settings.block_size
        to_come = sum(sequence.num_blocks_to_come(size) for sequence in live)
        to_come += sum(max(0, sequence.num_blocks_to_come(size) - sequence.num_blocks(size)) for sequence in joining)
        rate = self.rate.tokens_per_second
        spare = spare_target(len(live) + len(joining), to_come, rate, self.settings.reserve_seconds, size)
        num_forks = sum(sequence.num_forks_to_come for sequence in (*live, *joining))
        lacking = [0] * len(self.ledgers)
        for sequence in live if self.settings.keeping_boundaries else ():
            for group, scratch in sequence.scratches():
                lacking[group] += boundaries.num_lacking(sequence, scratch, self.settings)
        return [
            group.num_spare(self.settings.sizes, spare, num_forks, num_lacking)
            for group, num_lacking in zip(self.settings.groups, lacking, strict=True)
        ]

    @property
    def num_forks_to_come(self) -> int:
        """Forks to come of all live sequences."""
        live = (sequence for sequence in self.sequences.values() if sequence.state is SequenceState.LIVE)
        return sum(sequence.num_forks_to_come for sequence in live)

    def lacks_blocks_for_a_fork(self) -> bool:
        """Whether a group has no blocks for one, nor can the manager grant them."""
        return any(
            is_empty and len(reserve) < group.fork_blocks(self.settings.sizes)
            for group, is_empty, reserve in zip(self.settings.groups, self.pool_is_empty, self.reserves, strict=True)
        )

    @property
    def num_spare(self) -> int:
        """Blocks in the smallest reserve of a group that grows."""
        return min((len(self.reserves[group]) for group in self.settings.growing), default=0)

    def returning(self) -> tuple[tuple[SpareBlock, ...], ...]:
        """Surplus of the reserves, by group."""
        return tuple(tuple(reserve.returning) for reserve in self.reserves)

    def num_blank(self) -> int:
        """Blocks that are in no table and not in the reserve, hold no content, and can be granted by the manager: in that group
        that grows and has the fewest."""
        return min((self._num_blank(group) for group in self.settings.growing), default=0)

    def num_evictable(self, group: int) -> int:
        """Blocks that are in no table and not in the reserve, with or without content."""
        return self._num_blank(group) + self.ledgers[group].num_idle

    def _num_blank(self, group: int) -> int:
        ledger, reserve = self.ledgers[group], self.reserves[group]
        num_reserved = len(reserve) + len(reserve.returning)
        num_blank = ledger.num_blocks - 1 - ledger.num_used - ledger.num_idle - num_reserved
        return num_blank if self.num_free is None else min(num_blank, self.num_free[group])

    def num_blocks_due(self) -> int:
        """Blocks of each group that grows needed if each live sequence gets one more token."""
        if not self.settings.growing:
            return 0
        size = self.settings.block_size
        return sum(
            len(sequence.tokens) >= sequence.num_entries * size and sequence.num_blocks_to_come(size) > 0
            for sequence in self.sequences.values()
            if sequence.state is SequenceState.LIVE
        )

    def let_go(self, sequence: CacheSequence) -> None:
        """This worker no longer uses the sequence's blocks. Drops the last one first, as the manager does."""
        if sequence.uses_blocks:
            sequence.uses_blocks = False
            if sequence.parent is not None:
                sequence.parent = None
                self.forks.remove(sequence)
            for ledger, table in zip(self.ledgers, sequence.group_tables, strict=True):
                for block in table.blocks():
                    ledger.drop(block)

    def end(self, sequence: CacheSequence) -> None:
        """The sequence holds nothing, here or at the manager."""
        self.let_go(sequence)
        sequence.state = SequenceState.ENDED
        sequence.forget()
        if self.sequences.get(sequence.id) is sequence:
            del self.sequences[sequence.id]
