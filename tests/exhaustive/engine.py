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
from tests.tracer import AnySlots

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
        self.copies: list[Copied] = []
        """Of forks since the last step, or of the running one. For the slots they are made at once."""
        self.slots: list[AnySlots[Content]] = [
            AnySlots(group.num_blocks, 1 if isinstance(group, StateGroup) else settings.block_size)
            for group in settings.groups
        ]
        """By group, like `generations`. A state is what the slot of its last token would hold."""
        self.generations = [[0] * count for count in settings.num_blocks]
        self.failed: list[tuple[str, int, str]] = []
        """Streams that broke off since the last look: sequence, attempt, why."""

    def submit(self, sequence_id: str, attempt: int, salt: str, tokens: list[int], max_new_tokens: int) -> None:
        root = common_pb2.Root(model_fingerprint=FINGERPRINT, tenant_salt=salt)
        self.waiting.append(CacheSequence(sequence_id, attempt, root, tokens, max_new_tokens=max_new_tokens))

    def find(self, sequence_id: str, attempt: int) -> CacheSequence | None:
        """The request, if it has not ended here."""
        for sequence in [*self.waiting, *self.running]:
            if sequence.id == (sequence_id, attempt):
                return sequence
        return None

    def remove(self, sequence: CacheSequence) -> None:
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
            self.slots[copy.group].copy(copy.source, copy.target)
            self.copies.append(Copied(child, copy, tuple(self.slots[copy.group].block(copy.source))))
        return True

    def _end_copies(self) -> None:
        """The device has made the copies, at any time since the step began."""
        for _, copy, read in self.copies:
            for block in (copy.source, copy.target):
                if tuple(self.slots[copy.group].block(block)) != read:
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
        written: list[tuple[int, int]] = []
        for part in step:
            self._read(part)
            salt, size = part.sequence.root.tenant_salt, self.cache.settings.block_size
            texts = [(salt, part.tokens[: position + 1]) for position in range(part.start, part.end)]
            for group, table in enumerate(part.tables):
                written += [(group, block) for block in table[part.start // size : -(-part.end // size)]]
                self.slots[group].write(table, part.start, texts)
            for block in (part.state.running, part.state.snapshot) if part.state is not None else ():
                if block and self.cache.state.ledgers[-1].content(block) is not None:
                    raise BrokenLaw(f"sealed blocks never change: {part.sequence!r} writes block {block}, a snapshot")
                if block:
                    written.append((len(self.slots) - 1, block))
                    self.slots[-1].write([block], 0, texts[-1:])
        if len(set(written)) < len(written):
            raise BrokenLaw(f"one writer: a step writes a block twice; group and block of all: {written}")
        self.cache.end_step(
            [Computed(part.sequence, part.end, next_token(part.tokens) if part.samples else None) for part in step],
            0.0,
        )
        for part in step:
            sequence = part.sequence
            if sequence in self.running and len(sequence.tokens) >= sequence.max_tokens:
                self.remove(sequence)

    def _read(self, part: Part) -> None:
        """The device reads the KV of all tokens before those that it computes, and the state after them."""
        self._require_kv(part.sequence, part.tables, part.start, "a running step reads")
        self._require_state(part.sequence, part.state, part.start, "a running step reads")

    def _require_state(self, sequence: CacheSequence, state: StateBlocks | None, count: int, who: str) -> None:
        if state is None:
            return
        found = self.slots[-1].block(state.source)[0] if state.source else None
        if found != (content(sequence, count) if count else None):
            raise BrokenLaw(
                f"exact hits, use after free: {who} {state} after {count} tokens of {sequence!r}; it is {found}"
            )

    def _require_kv(self, sequence: CacheSequence, tables: Tables, count: int, who: str) -> None:
        for group, table in enumerate(tables):
            kind = self.cache.settings.groups[group]
            window = kind.window if isinstance(kind, WindowGroup) else 0
            read = self.slots[group].read(table, count)
            for position in range(max(0, count - window + 1) if window else 0, count):
                if read[position] != content(sequence, position + 1):
                    where = f"block {table[position // self.cache.settings.block_size]} of group {group}"
                    what = f"{who} {where} for position {position} of {sequence!r}; it holds {read[position]}"
                    raise BrokenLaw(f"exact hits, use after free: {what}")

    # -- after each event

    def settle(self) -> None:
        """Take in what the cache side has to say, as the engine does between two steps, and what its grants mean for the slots."""
        self._forget_slots()
        if self.step:
            return
        for event in self.cache.take_events():
            if isinstance(event, events.TableGranted):
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
            before, slots = self.generations[ledger.group], self.slots[ledger.group]
            for block, generation in enumerate(ledger._generation):
                if generation < before[block]:
                    raise BrokenLaw(f"generations grow: block {block} went from {before[block]} to {generation}")
                is_unused = ledger.content(block) is None and not ledger._num_users[block]
                if generation > before[block] or is_unused:
                    slots.write([block], 0, [None] * slots.block_size)
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
                        raise BrokenLaw(f"use after free: a running step names block {block}, which no table names")
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
                        writers = f"{sequence!r} and {filling[place]!r}"
                        raise BrokenLaw(f"one writer: block {block} is being filled by {writers}")


def _blocks_of_state(sequence: CacheSequence) -> list[list[int]]:
    """Of the last group, if it has a state: the blocks that the sequence may write."""
    state = sequence.group_tables[-1] if sequence.group_tables else None
    return [[one.block for one in state.scratch()]] if isinstance(state, RunningState) else []


def next_token(tokens: tuple[int, ...]) -> int:
    """The one right continuation, the same for equal texts."""
    return 100 + (sum(tokens) + len(tokens)) % 100
