"""The cache side's state: blocks, reserve, sequences, and which calls are due. It outlives sessions; the link does not."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

from . import events
from .ledger import BlockLedger
from .link_state import LinkState
from .report import Report
from .reserve import DecodingRate, Reserve, ReservedBlock, spare_target
from .sequence import CacheSequence, SequenceId, SequenceState


class CacheState:
    """Shared by the engine's methods (EngineCache), the next call and the replies."""

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self.link: LinkState | None = None
        """None while no session is open."""
        self.ledgers = tuple(BlockLedger(count, group) for group, count in enumerate(settings.num_blocks))
        """By group, like `reserves`."""
        self.reserves = tuple(Reserve() for _ in settings.num_blocks)
        self.sequences: dict[SequenceId, CacheSequence] = {}
        """Live and ending sequences, and those the manager may hold blocks for."""
        self.ending: list[CacheSequence] = []
        """Freed by the engine; their Free is not answered yet."""
        self.parked: list[CacheSequence] = []
        """Waiting for a prefix that another sequence is computing."""
        self.rate = DecodingRate()
        self.report_due_at: float | None = None
        """When unreported filled blocks must be reported; None if there are none."""
        self.is_urgent = False
        """The next report must not wait."""
        self.ask_again_at = 0.0
        """The last Allocate found no blocks: no other before this time, unless blocks are freed."""
        self.pool_is_empty = [False] * len(self.ledgers)
        """By group: the last call left fewer blocks in the pool than the reserve wanted."""
        self.num_free: list[int] | None = None
        """By group: blocks that the manager can grant without eviction, as of the last reply; None before the first of a session.
        Fewer than the blank blocks here if the budget of all workers is reached."""
        self.is_given_up = False
        """The blocks held here cannot be reported to the manager and must be forgotten."""
        self.events: list[events.Event] = []

    @property
    def holds_anything(self) -> bool:
        """Whether there is anything to report to a manager."""
        return any(ledger.holds_anything for ledger in self.ledgers) or any(self.reserves)

    def begin_session(self, link: LinkState, *, report_wanted: bool) -> None:
        """A session is open. If the manager asked for a report, it is sent first: also an empty one, since the manager waits."""
        for sequence in [sequence for sequence in self.ending if not sequence.in_step]:
            self._end_unheard(sequence)
        self.link = link
        if report_wanted:
            holders = [sequence for sequence in self.sequences.values() if sequence.num_entries]
            link.report = Report(self.ledgers, holders, [reserve.spare() for reserve in self.reserves])

    def lose_session(self, why: str) -> None:
        """The session is over. Blocks stay; unanswered calls count as not executed."""
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
        for sequence in [sequence for sequence in self.ending if not sequence.in_step]:
            self._end_unheard(sequence)
        for sequence in self.parked:
            sequence.parked_on = None
            sequence.state = SequenceState.WAITING
        self.parked = []
        for reserve in self.reserves:
            reserve.returning = []
        self.report_due_at, self.is_urgent = None, False
        self.ask_again_at, self.pool_is_empty = 0.0, [False] * len(self.ledgers)
        self.num_free = None

    def _end_unheard(self, sequence: CacheSequence) -> None:
        """End a freed sequence without a Free call: it will not be in the report."""
        self.ending.remove(sequence)
        self.end(sequence)

    def give_up(self, why: str, *, is_defect: bool = True) -> None:
        """No block held here can be kept; the engine gets an event."""
        self.link = None
        if not self.is_given_up:
            self.is_given_up = True
            self.events.append(events.GivenUp(why, is_defect))

    def open_link(self) -> LinkState | None:
        """The link of the open session, if its report is complete."""
        return None if self.link is None or self.link.report is not None else self.link

    def spare_target(self, joining: List[CacheSequence] = ()) -> int:
        """Blocks that the reserve of each group should hold for the live sequences, and for `joining` ones with tables for their
        tokens."""
        live = [sequence for sequence in self.sequences.values() if sequence.state is SequenceState.LIVE]
        size = self.settings.block_size
        to_come = sum(sequence.num_blocks_to_come(size) for sequence in live)
        to_come += sum(max(0, sequence.num_blocks_to_come(size) - sequence.num_blocks(size)) for sequence in joining)
        rate = self.rate.tokens_per_second
        return spare_target(len(live) + len(joining), to_come, rate, self.settings.reserve_seconds, size)

    @property
    def num_spare(self) -> int:
        """Blocks that each sequence of one block more could take: of the smallest reserve."""
        return min(map(len, self.reserves))

    def returning(self) -> tuple[tuple[ReservedBlock, ...], ...]:
        """Surplus of the reserves, by group."""
        return tuple(tuple(reserve.returning) for reserve in self.reserves)

    def num_blank(self) -> int:
        """Blocks that are in no table and not in the reserve, hold no content, and can be granted by the manager; of the group with
        the fewest."""
        return min(self._num_blank(group) for group in range(len(self.ledgers)))

    def _num_blank(self, group: int) -> int:
        ledger, reserve = self.ledgers[group], self.reserves[group]
        num_reserved = len(reserve) + len(reserve.returning)
        num_blank = ledger.num_blocks - 1 - ledger.num_used - ledger.num_idle - num_reserved
        return num_blank if self.num_free is None else min(num_blank, self.num_free[group])

    def num_blocks_due(self) -> int:
        """Blocks of each group needed if each live sequence gets one more token."""
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
            for ledger, table in zip(self.ledgers, sequence.tables, strict=True):
                for block in reversed(table):
                    ledger.drop(block)

    def end(self, sequence: CacheSequence) -> None:
        """The sequence holds nothing, here or at the manager."""
        self.let_go(sequence)
        sequence.state = SequenceState.ENDED
        sequence.forget()
        if self.sequences.get(sequence.id) is sequence:
            del self.sequences[sequence.id]


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Sizes of the pools, and timing and size of calls."""

    block_size: int = 16
    """Token slots of one block."""
    num_blocks: tuple[int, ...] = (1024,)
    """Blocks of each group's pool, the null block included."""
    report_seconds: float = 0.1
    """Filled blocks are reported at most this late, many in one call; sooner if another sequence waits for them."""
    reserve_seconds: float = 2.0
    """Seconds of decoding that the reserve should last without the manager."""
    prefix_wait_seconds: float = 10.0
    """How long a request waits for a prefix in flight that makes no progress, before it computes it itself."""
    no_blocks_retry_seconds: float = 1.0
    """Wait after NO_BLOCKS before the next Allocate if nothing is freed; only a safeguard."""
    max_items_per_call: int = 256
    """Sequences in one call to the manager."""
    max_call_bytes: int = 8 << 20
    """Bytes of tokens and table entries in one call, both directions; half of gRPC's message size."""

    @property
    def capacity(self) -> int:
        """Blocks of each group that one sequence can have at most: those of the smallest pool."""
        return min(self.num_blocks) - 1
