"""The smallest engine that does all that an engine does to the cache side: it queues, computes, preempts and frees.

Its "KV" is the truth itself: a slot holds the tokens, up to its own, for which it was computed. A slot whose block was granted
anew, or that nobody may read any more, holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvpool.v1 import common_pb2
from kvpool.worker_service.cache import events
from kvpool.worker_service.cache.engine_cache import Computed, EngineCache
from kvpool.worker_service.cache.entry import BlockCopy, StateBlocks
from kvpool.worker_service.cache.groups.state import RunningState, StateGroup
from kvpool.worker_service.cache.groups.window import WindowGroup
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from kvpool.worker_service.cache.settings import CacheSettings

FINGERPRINT = "tiny"
MAX_RUNNING = 2
OTHER_TOKEN = 99
"""With which forks go on."""

Content = tuple[str, tuple[int, ...]]
"""Tenant salt and tokens."""


class BrokenLaw(Exception):
    """A law does not hold; the message says which and where."""


Tables = Sequence[Sequence[int]]
"""By group."""


class Part(NamedTuple):
    """What a step does for one sequence: positions `start` … `end` − 1, through the tables as they were at the launch."""

    sequence: CacheSequence
    start: int
    end: int
    tables: tuple[tuple[int, ...], ...]
    """By group of layers that attend."""
    tokens: tuple[int, ...]
    samples: bool
    state: StateBlocks | None


class Copied(NamedTuple):
    """A copy that the next step, or the running one, makes for a fork: what is in the blocks must not change until it has ended."""

    fork: CacheSequence
    copy: BlockCopy
    slots: tuple[Content | None, ...]


def content(sequence: CacheSequence, num_tokens: int) -> Content:
    """What the slot of the last of the first `num_tokens` tokens holds once it is computed."""
    return sequence.root.tenant_salt, tuple(sequence.tokens[:num_tokens])


class TinyEngine:
    """One life of a worker's process."""

    def __init__(self, settings: CacheSettings) -> None:
        self.cache = EngineCache(settings)
        self.waiting: list[CacheSequence] = []
        self.running: list[CacheSequence] = []
        """In the order of admission: the last is the youngest."""
        self.step: list[Part] = []
        """The step that is on the device."""
        self.copies: list[Copied] = []
        """Of forks since the last step, or of the running one. For the slots they are made at once."""
        self.slots_per_block = [
            1 if isinstance(group, StateGroup) else settings.block_size for group in settings.groups
        ]
        """By group, like `slots` and `generations`. A state is what the slot of its last token would hold."""
        self.slots: list[list[Content | None]] = [
            [None] * (count * size) for count, size in zip(settings.num_blocks, self.slots_per_block, strict=True)
        ]
        self.generations = [[0] * count for count in settings.num_blocks]
        self.failed: list[tuple[str, int, str]] = []
        """Streams that broke off since the last look: sequence, attempt, why."""

    def submit(self, sequence_id: str, attempt: int, salt: str, tokens: list[int], max_new_tokens: int) -> None:
        """A request arrives."""
        root = common_pb2.Root(model_fingerprint=FINGERPRINT, tenant_salt=salt)
        self.waiting.append(CacheSequence(sequence_id, attempt, root, tokens, max_new_tokens=max_new_tokens))

    def find(self, sequence_id: str, attempt: int) -> CacheSequence | None:
        """The request, if it has not ended here."""
        for sequence in [*self.waiting, *self.running]:
            if sequence.id == (sequence_id, attempt):
                return sequence
        return None

    def remove(self, sequence: CacheSequence) -> None:
        """The request ends, for whatever reason."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.cache.free(sequence)

    def candidates(self) -> list[CacheSequence]:
        """Sequences that want a table, as `Scheduler.candidates` names them."""
        asking = [sequence for sequence in self.waiting if sequence.state is SequenceState.WAITING]
        unanswered = [sequence for sequence in asking if sequence.maybe_granted]
        others = [sequence for sequence in asking if not sequence.maybe_granted]
        busy = sum(seq.state in (SequenceState.ALLOCATING, SequenceState.LIVE) for seq in self.waiting)
        room = MAX_RUNNING - len(self.running) - busy - len(unanswered)
        return unanswered + others[: max(0, room)]

    # -- forks

    def to_fork(self) -> CacheSequence | None:
        """The youngest sequence that decodes and has tokens to come."""
        able = [
            sequence
            for sequence in self.running
            if 0 < sequence.num_computed_tokens >= len(sequence.tokens) - 1
            and len(sequence.tokens) < sequence.max_tokens
        ]
        return able[-1] if able else None

    def fork(self) -> bool:
        """It goes on with another token as well. False if the reserve has no blocks for it."""
        parent = self.to_fork()
        assert parent is not None
        num_computed = parent.num_computed_tokens
        forked = self.cache.fork(parent, f"{parent.id.sequence_id}'", num_tokens=num_computed)
        if forked is None:
            return False
        child = forked.sequence
        child.tokens.append(OTHER_TOKEN)
        self.running.append(child)
        for copy in forked.copies:
            size, slots = self.slots_per_block[copy.group], self.slots[copy.group]
            read = slots[copy.source * size : (copy.source + 1) * size]
            slots[copy.target * size : (copy.target + 1) * size] = read
            self.copies.append(Copied(child, copy, tuple(read)))
        return True

    def _end_copies(self) -> None:
        """The device has made the copies, at any time since the step began."""
        for _, copy, read in self.copies:
            size, slots = self.slots_per_block[copy.group], self.slots[copy.group]
            for block in (copy.source, copy.target):
                if tuple(slots[block * size : (block + 1) * size]) != read:
                    raise BrokenLaw(f"use after free: the running step copies {copy}, and block {block} has changed")
        self.copies = []

    # -- steps

    def begin_step(self) -> bool:
        """Launch a step with all that can run. False if there is none; sequences may have been preempted all the same."""
        assert not self.step
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            start, last = sequence.num_computed_tokens, len(sequence.tokens)
            most = self.cache.settings.max_chunk_tokens if sequence.scratches() else last
            end = start + self.cache.chunk(sequence, most)
            if self.cache.extend(sequence, end):
                tables, tokens = tuple(map(tuple, sequence.block_tables)), tuple(sequence.tokens)
                self.step.append(Part(sequence, start, end, tables, tokens, end == last, sequence.state_use(end)))
            elif self.cache.is_exhausted and len(self.running) > 1:
                youngest = self.running.pop()
                self.step = [part for part in self.step if part.sequence is not youngest]
                self.waiting.insert(0, self.cache.preempt(youngest))
        for part in self.step:
            self._read(part)
        self.copies = [copied for copied in self.copies if copied.fork.state is SequenceState.LIVE]
        self.cache.begin_step([part.sequence for part in self.step])
        return bool(self.step)

    def end_step(self) -> None:
        """The device has done the step: KV is written, and each sequence has its next token."""
        step, self.step = self.step, []
        self._end_copies()
        written: set[tuple[int, int]] = set()
        for part in step:
            self._read(part)
            for group, table in enumerate(part.tables):
                for position in range(part.start, part.end):
                    slot = self._slot(table, position)
                    if (group, slot) in written:
                        raise BrokenLaw(f"one writer: two sequences write slot {slot} of group {group} in one step")
                    written.add((group, slot))
                    self.slots[group][slot] = part.sequence.root.tenant_salt, part.tokens[: position + 1]
            for block in (part.state.running, part.state.snapshot) if part.state is not None else ():
                if block and (len(self.slots) - 1, block) in written:
                    raise BrokenLaw(f"one writer: two sequences write their state to block {block} in one step")
                if block and self.cache.state.ledgers[-1].content(block) is not None:
                    raise BrokenLaw(f"sealed blocks never change: {part.sequence!r} writes block {block}, a snapshot")
                if block:
                    written.add((len(self.slots) - 1, block))
                    self.slots[-1][block] = part.sequence.root.tenant_salt, part.tokens[: part.end]
        self.cache.end_step(
            [Computed(part.sequence, part.end, next_token(part.tokens) if part.samples else None) for part in step],
            0.0,
        )
        for part in step:
            sequence = part.sequence
            if sequence in self.running and len(sequence.tokens) >= sequence.max_tokens:
                self.remove(sequence)

    def _slot(self, table: Sequence[int], position: int) -> int:
        size = self.cache.settings.block_size
        return table[position // size] * size + position % size

    def _read(self, part: Part) -> None:
        """The device reads the KV of all tokens before those that it computes, and the state after them."""
        self._require_kv(part.sequence, part.tables, part.start, "a running step reads")
        self._require_state(part.sequence, part.state, part.start, "a running step reads")

    def _require_state(self, sequence: CacheSequence, state: StateBlocks | None, count: int, who: str) -> None:
        if state is None:
            return
        found = self.slots[-1][state.source] if state.source else None
        if found != (content(sequence, count) if count else None):
            raise BrokenLaw(
                f"exact hits, use after free: {who} {state} after {count} tokens of {sequence!r}; it is {found}"
            )

    def _require_kv(self, sequence: CacheSequence, tables: Tables, count: int, who: str) -> None:
        for group, table in enumerate(tables):
            kind = self.cache.settings.groups[group]
            window = kind.window if isinstance(kind, WindowGroup) else 0
            for position in range(max(0, count - window + 1) if window else 0, count):
                slot = self._slot(table, position)
                if self.slots[group][slot] != content(sequence, position + 1):
                    raise BrokenLaw(
                        f"exact hits, use after free: {who} block {table[position // self.cache.settings.block_size]} of group "
                        f"{group} for position {position} of {sequence!r}; it holds {self.slots[group][slot]}"
                    )

    # -- after each event

    def settle(self) -> None:
        """Take in what the cache side has to say, as the engine does between two steps, and what its grants mean for the slots."""
        self._forget_slots()
        if self.step:
            return
        for event in self.cache.take_events():
            if isinstance(event, events.Granted):
                if event.sequence in self.waiting:
                    self.waiting.remove(event.sequence)
                    self.running.append(event.sequence)
            elif isinstance(event, events.Refused | events.Stopped):
                why = "stopped"
                if isinstance(event, events.Refused):
                    why = f"refused: {event.status.message}"
                if event.sequence in self.waiting or event.sequence in self.running:
                    self.remove(event.sequence)
                    self.failed.append((*event.sequence.id, why))
            elif isinstance(event, events.SessionLost) and "disagree" in event.why:
                raise BrokenLaw(f"the books agree: {event.why}")
            elif isinstance(event, events.GivenUp):
                raise BrokenLaw(f"a report is always taken in: {event.why}")

    def _forget_slots(self) -> None:
        """A block that was granted anew may be written by its new owner at any time; one that nobody may read holds nothing."""
        for ledger in self.cache.state.ledgers:
            size = self.slots_per_block[ledger.group]
            before, slots = self.generations[ledger.group], self.slots[ledger.group]
            for block, generation in enumerate(ledger._generation):
                if generation < before[block]:
                    raise BrokenLaw(f"generations grow: block {block} went from {before[block]} to {generation}")
                is_unused = ledger.content(block) is None and not ledger._num_users[block]
                if generation > before[block] or is_unused:
                    slots[block * size : (block + 1) * size] = [None] * size
            self.generations[ledger.group] = list(ledger._generation)

    def require_laws(self) -> None:
        """One writer; and whoever may read a slot finds there what it expects."""
        ledgers = self.cache.state.ledgers
        filling: dict[tuple[int, int], CacheSequence] = {}
        in_step = [part.sequence for part in self.step]
        for part in self.step:
            for ledger, table in zip(ledgers, part.tables, strict=False):
                for block in table:
                    if block and not ledger._num_users[block]:
                        raise BrokenLaw(
                            f"use after free: a running step names block {block}, which no table here names"
                        )
        for sequence in {id(s): s for s in [*self.cache.state.sequences.values(), *in_step]}.values():
            if not (sequence.uses_blocks or sequence.in_step):
                continue
            count = sequence.num_computed_tokens
            self._require_kv(sequence, sequence.block_tables, count, "a live table names")
            self._require_state(sequence, sequence.state_use(count), count, "a live sequence has")
            for ledger, blocks in zip(ledgers, [*sequence.block_tables, *_blocks_of_state(sequence)], strict=False):
                for block in blocks:
                    place = ledger.group, block
                    if block and ledger.content(block) is None and filling.setdefault(place, sequence) is not sequence:
                        raise BrokenLaw(
                            f"one writer: block {block} is being filled by {sequence!r} and {filling[place]!r}"
                        )


def _blocks_of_state(sequence: CacheSequence) -> list[list[int]]:
    """Of the last group, if it has a state: the blocks that the sequence may write."""
    state = sequence.group_tables[-1] if sequence.group_tables else None
    return [[one.block for one in state.scratch()]] if isinstance(state, RunningState) else []


def next_token(tokens: tuple[int, ...]) -> int:
    """The one right continuation, the same for equal texts."""
    return 100 + (sum(tokens) + len(tokens)) % 100
