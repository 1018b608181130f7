"""What a worker holds in one session: blocks, reserve, sequences, and what is due to be said. Forgotten whole with the session."""

from __future__ import annotations

from . import events
from .ledger import BlockLedger
from .link import Link
from .reserve import Reserve, spare_target
from .sequence import CacheSequence, SequenceId, SequenceState
from .settings import CacheSettings


class SessionState:
    """Shared by what the engine does (EngineCache), what goes up (uplink) and what comes down (downlink)."""

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self.link: Link | None = None
        """None until the session is open."""
        self.ledger = BlockLedger(settings.num_blocks)
        self.reserve = Reserve()
        self.sequences: dict[SequenceId, CacheSequence] = {}
        """Live and ending sequences, and those the manager may hold blocks for."""
        self.ending: list[CacheSequence] = []
        """Done with; their Free is not answered yet."""
        self.parked: list[CacheSequence] = []
        """Waiting for a prefix that another sequence is computing."""
        self.tokens_per_second = 0.0
        """Decoding rate of late, over all sequences."""
        self.report_due_at: float | None = None
        """When the filled blocks that the manager does not know must be reported; None if there are none."""
        self.is_urgent = False
        """Somebody waits for the next report."""
        self.ask_again_at = 0.0
        """The last Allocate found no blocks: no other before this time, unless something is given back."""
        self.pool_is_empty = False
        """The last call left fewer blocks in the pool than the reserve wanted."""
        self.is_lost = False
        """The session must be given up."""
        self.events: list[events.Event] = []

    def lose(self, why: str) -> None:
        """Give the session up; the engine is told by an event."""
        if not self.is_lost:
            self.is_lost = True
            self.events.append(events.SessionLost(why))

    def open_link(self) -> Link | None:
        """The link of a session that is open and not lost."""
        return None if self.is_lost else self.link

    def spare_target(self) -> int:
        """Blocks that the reserve should hold for the sequences that are live now."""
        live = [sequence for sequence in self.sequences.values() if sequence.state is SequenceState.LIVE]
        size = self.settings.block_size
        to_come = sum(sequence.num_blocks_to_come(size) for sequence in live)
        return spare_target(len(live), to_come, self.tokens_per_second, self.settings.reserve_seconds, size)

    def let_go(self, sequence: CacheSequence) -> None:
        """Nothing here touches the sequence's blocks any more."""
        if sequence.uses_blocks:
            sequence.uses_blocks = False
            for block in sequence.table:
                self.ledger.drop(block)

    def end(self, sequence: CacheSequence) -> None:
        """The sequence holds nothing any more, here or at the manager."""
        self.let_go(sequence)
        sequence.state = SequenceState.ENDED
        sequence.forget()
        if self.sequences.get(sequence.id) is sequence:
            del self.sequences[sequence.id]
