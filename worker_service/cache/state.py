"""What a worker holds: blocks, reserve, sequences, and what is due to be said. It outlives sessions; the link does not."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

from . import events
from .ledger import BlockLedger
from .link_state import LinkState
from .report import Report
from .reserve import DecodingRate, Reserve, spare_target
from .sequence import CacheSequence, SequenceId, SequenceState


class CacheState:
    """Shared by what the engine does (EngineCache), what goes up (uplink) and what comes down (downlink)."""

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self.link: LinkState | None = None
        """None while no session is open."""
        self.ledger = BlockLedger(settings.num_blocks)
        self.reserve = Reserve()
        self.sequences: dict[SequenceId, CacheSequence] = {}
        """Live and ending sequences, and those the manager may hold blocks for."""
        self.ending: list[CacheSequence] = []
        """Done with; their Free is not answered yet."""
        self.parked: list[CacheSequence] = []
        """Waiting for a prefix that another sequence is computing."""
        self.rate = DecodingRate()
        self.report_due_at: float | None = None
        """When the filled blocks that the manager does not know must be reported; None if there are none."""
        self.is_urgent = False
        """Somebody waits for the next report."""
        self.ask_again_at = 0.0
        """The last Allocate found no blocks: no other before this time, unless something is given back."""
        self.pool_is_empty = False
        """The last call left fewer blocks in the pool than the reserve wanted."""
        self.num_free: int | None = None
        """Blocks that the manager can grant without evicting any, as of the last reply; None before the first of a session. Fewer
        than are blank here where the budget of all workers is reached."""
        self.is_given_up = False
        """What is held here cannot be made known to the manager: it must be forgotten."""
        self.events: list[events.Event] = []

    @property
    def holds_anything(self) -> bool:
        """Whether there is something that a manager would have to know."""
        return bool(self.ledger.holds_anything or self.reserve)

    def begin_session(self, link: LinkState, *, report_wanted: bool) -> None:
        """A session is open. What is held here is reported in it before anything else is said, if it is wanted: even if that has
        come to nothing since Register, for the manager waits for it."""
        for sequence in [sequence for sequence in self.ending if not sequence.in_step]:
            self._end_unheard(sequence)
        self.link = link
        if report_wanted:
            holders = [sequence for sequence in self.sequences.values() if sequence.table]
            link.report = Report(self.ledger, holders, self.reserve.spare())

    def lose_session(self, why: str) -> None:
        """The session is over; what is held here stays, and what it left unanswered never happened."""
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
        self.reserve.returning = []
        self.report_due_at, self.is_urgent = None, False
        self.ask_again_at, self.pool_is_empty = 0.0, False
        self.num_free = None

    def _end_unheard(self, sequence: CacheSequence) -> None:
        """A sequence that is done with ends without a Free: the manager will not find it in the report."""
        self.ending.remove(sequence)
        self.end(sequence)

    def give_up(self, why: str, *, is_defect: bool = True) -> None:
        """Nothing that is held here can be kept; the engine is told by an event."""
        self.link = None
        if not self.is_given_up:
            self.is_given_up = True
            self.events.append(events.GivenUp(why, is_defect))

    def open_link(self) -> LinkState | None:
        """The link of the open session, if its report is in."""
        return None if self.link is None or self.link.report is not None else self.link

    def spare_target(self, joining: List[CacheSequence] = ()) -> int:
        """Blocks that the reserve should hold for the sequences that are live now, and for those that join them with a table for
        the tokens that they have."""
        live = [sequence for sequence in self.sequences.values() if sequence.state is SequenceState.LIVE]
        size = self.settings.block_size
        to_come = sum(sequence.num_blocks_to_come(size) for sequence in live)
        to_come += sum(max(0, sequence.num_blocks_to_come(size) - sequence.num_blocks(size)) for sequence in joining)
        rate = self.rate.tokens_per_second
        return spare_target(len(live) + len(joining), to_come, rate, self.settings.reserve_seconds, size)

    def num_blank(self) -> int:
        """Blocks that neither a table nor the reserve has, that hold nothing for others, and that the manager can grant."""
        num_reserved = len(self.reserve) + len(self.reserve.returning)
        num_blank = self.settings.num_blocks - 1 - self.ledger.num_used - self.ledger.num_idle - num_reserved
        return num_blank if self.num_free is None else min(num_blank, self.num_free)

    def num_blocks_due(self) -> int:
        """Blocks that are needed if each live sequence gets one more token."""
        size = self.settings.block_size
        return sum(
            len(sequence.tokens) >= len(sequence.table) * size and sequence.num_blocks_to_come(size) > 0
            for sequence in self.sequences.values()
            if sequence.state is SequenceState.LIVE
        )

    def let_go(self, sequence: CacheSequence) -> None:
        """Nothing here touches the sequence's blocks any more. The last one first, as the manager frees them."""
        if sequence.uses_blocks:
            sequence.uses_blocks = False
            for block in reversed(sequence.table):
                self.ledger.drop(block)

    def end(self, sequence: CacheSequence) -> None:
        """The sequence holds nothing any more, here or at the manager."""
        self.let_go(sequence)
        sequence.state = SequenceState.ENDED
        sequence.forget()
        if self.sequences.get(sequence.id) is sequence:
            del self.sequences[sequence.id]


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Size of the pool, and how often and how much is said to the manager."""

    block_size: int = 16
    """Token slots of one block."""
    num_blocks: int = 1024
    """Blocks of the pool, the null block included."""
    report_seconds: float = 0.1
    """Filled blocks are reported at most this late, many in one call; sooner if another sequence waits for them."""
    reserve_seconds: float = 2.0
    """How many seconds of decoding the reserve should last without the manager."""
    prefix_wait_seconds: float = 10.0
    """How long a request waits for a prefix in flight that makes no progress, before it computes it itself."""
    no_blocks_retry_seconds: float = 1.0
    """When to ask again after NO_BLOCKS although nothing was given back; only a safeguard."""
    max_items_per_call: int = 256
    """Sequences in one call to the manager."""
    max_call_bytes: int = 8 << 20
    """Bytes of tokens and table entries, there and back, in one call; half of what gRPC is told to let through."""
