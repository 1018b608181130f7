"""Whatever happens to the sequences of a worker's cache side, with groups of every kind, over the manager's core.

A device holds the KV of what is computed. Every step reads what is right, every block holds what it is named for, every law of the
manager holds, all that was computed gets stated, and in the end nothing is held.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import Counter
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from random import Random
from typing import Any, NamedTuple

import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.refusal import Refusal
from kvpool.v1 import common_pb2
from kvpool.worker_service.cache import events, report
from kvpool.worker_service.cache.engine_cache import Computed
from kvpool.worker_service.cache.entry import BlockCopy, StateBlocks
from kvpool.worker_service.cache.groups.scratch import Scratch, ScratchGroup
from kvpool.worker_service.cache.groups.state import StateGroup
from kvpool.worker_service.cache.groups.unit import Unit
from kvpool.worker_service.cache.groups.window import WindowGroup
from kvpool.worker_service.cache.ledger import Content
from kvpool.worker_service.cache.link_state import MutatingCall
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from tests import tracer
from tests.worker_service.windowed import Worker

SIZE, CHUNK, GRID = 4, 8, 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {"num_blocks": (22,), "windows": ()},
    "window": {"num_blocks": (36, 22), "windows": (0, 9)},
    "windows alone": {"num_blocks": (32, 32), "windows": (6, 9)},
    "state": {"num_blocks": (36, 12), "windows": (), "grid": GRID},
    "window and state": {"num_blocks": (36, 36, 12), "windows": (0, 9, 0), "grid": GRID},
    "unit": {"num_blocks": (30, 10), "windows": (), "cross_group": 1},
}
INPUTS = {sha256(bytes([number])).digest(): list(range(10 * number, 10 * number + 7)) for number in range(4)}
"""By digest: the inputs of the encoder."""


@cache
def right_slots(input_digest: bytes, tokens: tuple[int, ...]) -> list[int]:
    """What the slots of a text must hold."""
    slots: list[int] = []
    root = tracer.root_digest(encoder_tokens=INPUTS.get(input_digest, ()))
    tracer.extend(slots, root, tokens)
    return slots


class Part(NamedTuple):
    """What a step computes of a sequence, with the blocks that it was launched with."""

    sequence: CacheSequence
    start: int
    end: int
    tables: list[list[int]]
    use: StateBlocks | None
    to_encode: bool

    def blocks(self) -> set[tuple[int, int]]:
        """All blocks that it names, with their groups."""
        tables = self.tables if self.use is None else [*self.tables[:-1], list(self.use)]
        return {(group, block) for group, table in enumerate(tables) for block in table if block}


class Story(Worker):
    """A worker to which anything may happen; `do` is one thing."""

    def __init__(self, seed: int, layout: dict[str, Any], happened: Counter[str]) -> None:
        self.draw, self.happened = Random(seed), happened
        super().__init__(**layout, block_size=SIZE, chunk=CHUNK, retention_interval=self.draw.choice([0, 0, 16]))
        self.all: list[CacheSequence] = []
        self.waiting: list[CacheSequence] = []
        self.step_parts: list[Part] | None = None
        """Of the running step; None: there is none."""
        self.late: list[Any] = []
        """Requests of which a duplicate is on its way."""
        self.late_answers: list[tuple[MutatingCall, Any]] = []
        """Calls that were given up, and their answers."""
        groups = self.cache.settings.groups
        self.slots = [tracer.Slots(one.num_blocks, 1 if isinstance(one, StateGroup) else SIZE) for one in groups]

    @property
    def live(self) -> list[CacheSequence]:
        return [one for one in self.all if one.state is SequenceState.LIVE]

    def do(self) -> None:
        """One of the things that can happen."""
        things: list[tuple[Callable[[], None], int]] = [
            (self.submit, 4), (self.talk, 12), (self.launch_step, 6), (self.end_step, 8), (self.fork_one, 5), (self.free_one, 1),
            (self.preempt_one, 1), (self.tell_one, 1), (self.lose_session, 1), (self.fence_one, 1),
        ]  # fmt: skip
        functions, weights = zip(*things, strict=True)
        self.now += self.draw.choice([0.0, 0.1, 1.0])
        self.draw.choices(functions, weights)[0]()
        self.note_events()
        self.check()

    # -- sequences

    def submit(self) -> None:
        """A prompt that begins like others, or like none."""
        if len(self.waiting) + len(self.live) >= 5:
            return
        draw = self.draw
        begin = draw.choice([0, 0, 3, 3, 3]) * 100
        prompt = [*range(begin, begin + draw.choice([1, 8, 16, 17, 24, 25])), *draw.choice([(), (77,), (78, 79)])]
        options: dict[str, Any] = {"kept": draw.choice([(), (GRID,)]), "no_wait": draw.random() < 0.2}
        if self.cache.settings.encoder_capacity:
            digest, encoder = draw.choice(list(INPUTS.items()))
            options["root"] = common_pb2.Root(model_fingerprint="m", input_digest=digest)
            options["num_encoder_tokens"] = len(encoder)
        sequence = self.sequence(str(len(self.all)), prompt, draw.randint(1, 14), **options)
        sequence.num_forks_to_come = draw.choice([0, 0, 1, 2])
        self.all.append(sequence)
        self.waiting.append(sequence)

    def fork_one(self) -> None:
        """No sequence is forked while a step uses it, or copies for it."""
        parents = [
            one
            for one in self.live
            if not one.in_step
            and not (one.num_copies and self.step_parts)
            and one.num_computed_tokens == len(one.tokens) - 1 > 0
            and not one.num_tokens_to_encode
            and one.max_tokens - len(one.tokens) >= 2
        ]
        if not parents or len(self.live) > 7:
            return
        parent, parts = self.draw.choice(parents), self.draw.random() < 0.5
        forked = self.cache.fork(parent, str(len(self.all)), num_tokens=parent.num_computed_tokens if parts else None)
        self.happened["fork" if forked else "fork without blocks"] += 1
        if forked is not None:
            child = forked.sequence
            self.happened["fork of a fork"] += parent.parent is not None
            child.tokens += [self.draw.randrange(90)] * parts
            self.all.append(child)
            if self.draw.random() < 0.3:  # before a step makes its copies
                self.talk()
                self.draw.choice([self.free, self.tell_it])(self.draw.choice([child, parent]))

    def free_one(self) -> None:
        if self.waiting or self.live:
            sequence = self.draw.choice([*self.waiting, *self.live])
            self.happened["freed in a step"] += sequence.in_step
            self.free(sequence)

    def free(self, sequence: CacheSequence) -> None:
        self.cache.free(sequence)
        self.waiting = [one for one in self.waiting if one is not sequence]

    def preempt_one(self) -> None:
        if self.live:
            again = self.cache.preempt(self.draw.choice(self.live))
            self.all.append(again)
            self.waiting.append(again)

    # -- steps

    def launch_step(self) -> None:
        """Launch a step of some sequences."""
        if self.step_parts is not None:
            return
        parts = []
        for one in self.live:
            start = one.num_computed_tokens
            most = min(self.draw.randint(1, CHUNK), len(one.tokens) - start)
            end = start + self.cache.chunk(one, most if self.draw.random() < 0.3 else CHUNK)
            if self.draw.random() < 0.8 and end > start and self.cache.extend(one, end):
                tables = [list(table) for table in one.tables]
                parts.append(Part(one, start, end, tables, one.state_use(end), one.num_tokens_to_encode > 0))
        if parts:
            self.cache.begin_step([part.sequence for part in parts])
            self.step_parts, self.copying = parts, list(self.cache.state.copies_made)
            self.blocks = {pair for part in parts for pair in part.blocks()}
            for copy in self.copies():
                self.blocks |= {(copy.group, copy.source), (copy.group, copy.target)}
            self.generations = self.generations_in_use()

    def copies(self) -> list[BlockCopy]:
        """Those of the running step."""
        return [copy for one in self.copying for copy in one.copies]

    def generations_in_use(self) -> list[int]:
        """Of all blocks that the running step names."""
        ledgers = self.cache.state.ledgers
        assert all(ledgers[group]._num_users[block] for group, block in self.blocks), "a block of a step is given back"
        return [ledgers[group]._generation[block] for group, block in self.blocks]

    def end_step(self) -> None:
        """The running step ends: well, with bad logits of one sequence, or not at all."""
        parts, self.step_parts = self.step_parts, None
        if parts is None:
            return
        assert self.generations_in_use() == self.generations, "a block of a running step is granted again"
        how = self.draw.choices(["well", "bad", "failed"], [18, 1, 1])[0]
        self.happened[how] += 1
        for copy in self.copies() if how != "failed" else ():
            self.slots[copy.group].copy(copy.source, copy.target)
        bad = self.draw.choice(parts) if how == "bad" else None
        for part in parts:
            self.compute_part(part, is_good=part is not bad and how != "failed")
        gone = [bad.sequence] if bad is not None else []
        if how == "failed":
            gone = [*(part.sequence for part in parts), *(one.fork for one in self.copying)]
            self.cache.fail_step([part.sequence for part in parts])
        else:
            self.cache.end_step([self.result(part, part is not bad) for part in parts], self.now)
        for one in [*gone, *(part.sequence for part in parts)]:
            if one in gone or len(one.tokens) >= one.max_tokens:
                self.free(one)

    def result(self, part: Part, is_good: bool) -> Computed:
        """What the engine says of a part."""
        sequence, start, end = part[:3]
        if not is_good:
            return Computed(sequence, start, None)
        return Computed(sequence, end, self.draw.choice([7, 7, 7, 8]) if end == len(sequence.tokens) else None)

    def compute_part(self, part: Part, *, is_good: bool) -> None:
        """Read what the part sees, and write what it computes; else anything."""
        sequence, start, end = part[:3]
        right = right_slots(sequence.root.input_digest, tuple(sequence.tokens[:end]))
        written: list[Any] = right[start:end] if is_good else [None] * (end - start)
        for index, group in enumerate(self.cache.settings.groups):
            slots, ledger, table = self.slots[index], self.cache.state.ledgers[index], part.tables[index]
            if part.use is not None and isinstance(group, StateGroup):
                before = slots.block(part.use.source) if part.use.source else []
                assert not is_good or before == right[max(0, start - 1) : start], "the step begins with another state"
                into = [block for block in part.use[1:] if block]
                for block in into:
                    slots.write([block], 0, written[-1:])
            elif group.table_type.is_encoder:
                encoder = INPUTS[sequence.root.input_digest]
                into = table if part.to_encode else []
                if into:
                    slots.write(into, 0, tracer.encoder_slots(encoder) if is_good else [None] * len(encoder))
                assert not is_good or slots.read(table, len(encoder)) == tracer.encoder_slots(encoder)
            else:
                first = max(0, start - group.window + 1) if isinstance(group, WindowGroup) else 0
                assert 0 not in table[first // SIZE : -(-end // SIZE)], "a step reads a hole"
                read = slots.read(table, start)[first:]
                assert not is_good or read == right[first:start], "a step reads what is not its own"
                into = table[start // SIZE : -(-end // SIZE)]
                slots.write(table, start, written)
            for block in into:
                assert ledger.content(block) is None, "what others may hit is written"
                assert ledger._num_users[block] == 1, "what others have is written"

    # -- the manager

    def talk(self) -> None:
        """Some calls; requests and answers may be lost, and come twice."""
        for _ in range(self.draw.choice([1, 1, 4])):
            if self.late and self.draw.random() < 0.3:
                with contextlib.suppress(Refusal):
                    self.execute(self.late.pop())
            call = self.cache.next_call(self.candidates, self.now)
            leaders = [
                self.cache.state.sequences.get(one.parked_on) for one in self.cache.state.parked if one.parked_on
            ]
            assert None not in leaders, "one waits for a leader that has ended"
            if call is None:
                return
            what = self.draw.choices(["answered", "request lost", "answer lost"], [6, 1, 1])[0]
            self.happened[f"{type(call.request).__name__} {what}"] += 1
            self.late += [call.request] * (self.draw.random() < 0.2)
            answer: Any = None if what == "request lost" else self.execute(call.request)
            if what == "answered":
                self.cache.on_reply(call, answer, self.now)
            else:
                self.cache.on_failure(call, "", self.now)
                self.late_answers += [(call, answer)] * (answer is not None)
            if self.late_answers and self.draw.random() < 0.2:
                self.cache.on_reply(*self.late_answers.pop(), self.now)

    def candidates(self) -> list[CacheSequence]:
        return [one for one in self.waiting if one.state is SequenceState.WAITING]

    def note_events(self) -> None:
        """None says that the worker and the manager disagree."""
        for event in self.cache.take_events():
            if isinstance(event, events.SessionLost):
                assert event.why == "in this story"
            elif isinstance(event, events.Stopped):
                self.free(event.sequence)
            elif isinstance(event, events.Refused):
                self.waiting.remove(event.sequence)
            self.happened[type(event).__name__] += 1
        for one in self.waiting:
            self.happened["hit"] += one.num_cached_tokens > 0
            self.happened["unit hit"] += one.encoder_cached
            self.happened["parked"] += one.state is SequenceState.PARKED
        self.waiting = [one for one in self.waiting if one.state is not SequenceState.LIVE]

    def tell_one(self) -> None:
        """A heartbeat, which may bring a boundary."""
        if self.live and self.cache.settings.keeping_boundaries:
            self.tell_it(self.draw.choice(self.live))
        else:
            self.heartbeat()

    def tell_it(self, one: CacheSequence) -> None:
        """A boundary of a sequence, often where it is just now."""
        grid = self.cache.settings.grid_tokens or SIZE
        at = self.draw.choice([one.num_computed_tokens // grid, self.draw.randint(1, 6)])
        self.tell(one.id.sequence_id, grid * max(1, at), one.round)

    def lose_session(self) -> None:
        """And begin another one, with the same manager or the next; the report may be under way for long. The answer to the last
        heartbeat comes late."""
        session, request = self.cache.session, self.cache.keep_alive(common_pb2.WorkerLoad())
        answer = self.execute(request)
        self.cache.state.lose_session("in this story")
        if self.draw.random() < 0.5:
            self.manager = CacheManager(self.manager.epoch + 1)
        self.late, self.late_answers = [], []
        self.begin_report()
        self.cache.on_keep_alive(session, answer)

    def fence_one(self) -> None:
        """A larger attempt of a sequence runs on another worker."""
        if known := list(self.manager.sessions[-1].sequences.values()):
            self.draw.choice(known).fenced = True

    # -- laws

    def check(self) -> None:
        assert self.manager.check().violations == []
        settings = self.cache.settings
        for index, (ledger, group) in enumerate(zip(self.cache.state.ledgers, settings.groups, strict=True)):
            for block in range(1, ledger.num_blocks):
                if (content := ledger.content(block)) is not None:
                    assert self.holds(index, block, content), (
                        f"block {block} of group {index} is not what it is named for"
                    )
            assert not (group.table_type.is_encoder and self.cache.num_spare_blocks[index])
            if isinstance(group, ScratchGroup):
                most = group.scratch_blocks(settings.sizes)
                tables = [one.group_tables[index] for one in self.live]
                assert all(isinstance(one, Scratch) and len(one.scratch()) <= most for one in tables)

    def holds(self, index: int, block: int, content: Content) -> bool:
        """Whether a block has what its content says."""
        if isinstance(content, Unit):
            right = tracer.encoder_slots(INPUTS[content.root.input_digest])
            return self.slots[index].read(content.unit_blocks, content.num_tokens) == right
        tokens: list[int] = []
        digest, last = content.root.input_digest, content
        while last is not None:
            tokens[:0] = array("I", last.tokens)
            last = last.parent  # type: ignore[assignment]
        found = self.slots[index].block(block)
        return found == right_slots(digest, tuple(tokens))[-len(found) :]

    def end_story(self) -> None:
        """Nothing more comes: all is stated, and then given back."""
        self.end_step()
        for one in list(self.waiting):
            self.free(one)
        self.settle()
        for one in self.live:
            assert one.parent is None, "a fork is not stated"
            assert one.acked_computed_tokens >= one.num_computed_tokens // SIZE * SIZE
            assert not one.has_encoder_news
        while self.live:  # copies for forks are made by the next step
            self.launch_step()
            self.end_step()
            for one in self.live:
                if self.draw.random() < 0.3:
                    self.free(one)
        self.settle()
        assert self.cache.is_idle
        assert all(one.state is SequenceState.ENDED for one in self.all)
        assert not any(self.held())
        self.check()

    def settle(self) -> None:
        """All calls that are due, answered before what they bring about is looked at, and then those due after it."""
        for _ in range(4):
            self.now += 10.0
            last = len(self.methods) + 500
            while (call := self.cache.next_call(self.candidates, self.now)) is not None:
                self.answer(call)
                assert len(self.methods) < last, f"calls without end: {self.methods[-6:]}"
            self.note_events()


ALWAYS = {
    "well", "bad", "failed", "fork", "fork of a fork", "hit", "parked", "freed in a step", "Stopped", "Refused",
    *(f"{call}Request {what}" for call in ("Allocate", "Append", "Fork", "Free", "Report")
      for what in ("answered", "request lost", "answer lost")),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_happens_all_laws_hold(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports come in many parts."""
    for name in ("_MAX_CONTENTS", "_MAX_BACKGROUND_CONTENTS", "_MAX_BLOCKS"):
        monkeypatch.setattr(report, name, 3)
    happened: Counter[str] = Counter()
    for seed in range(30):
        story = Story(seed, LAYOUTS[layout], happened)
        for _ in range(100):
            story.do()
        story.end_story()
    assert ALWAYS - happened.keys() == set()
    assert happened["unit hit"] or layout != "unit"
