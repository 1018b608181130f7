"""A fake GPU: runs the tracer model's steps late, in pieces, and goes on while its process is frozen."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool.worker_service.cache.entry import BlockCopy
from kvpool.worker_service.cache.groups.state import StateGroup
from kvpool.worker_service.cache.groups.unit import Unit, UnitGroup
from kvpool.worker_service.cache.groups.window import WindowGroup
from kvpool.worker_service.cache.ledger import Content
from kvpool.worker_service.cache.sequence import CacheSequence
from kvpool.worker_service.cache.settings import CacheSettings
from kvpool.worker_service.step import PartResult, SampledToken, SequencePart, Step
from tests import tracer
from tests.tracer_beams import candidates_after

if TYPE_CHECKING:
    from tests.simulation.worker import WorkerProcess


@dataclass
class _Part:
    """A sequence's part of the running step, and how many of its tokens are done."""

    asked: SequencePart
    sequence: CacheSequence
    num_done: int = 0


class Gpu:
    """The KV slots of one worker's process, and the step that is running on them. Dies with its process."""

    def __init__(self, worker: WorkerProcess, settings: CacheSettings) -> None:
        self.worker = worker
        self.block_size = settings.block_size
        self.slots = [
            tracer.Slots(group.num_blocks, 1 if isinstance(group, StateGroup) else settings.block_size)
            for group in settings.groups
        ]
        """By group. A state is what the slot of its last token would hold."""
        self._attending = [index for index, group in enumerate(settings.groups) if group.table_type.is_attended]
        self._unit_group = next((i for i, group in enumerate(settings.groups) if isinstance(group, UnitGroup)), -1)
        self.step_seconds = 0.02
        self.is_busy = False
        self._generations: list[list[int]] = []
        """Of all blocks, by group, when the running step was launched."""
        self._copies: Sequence[BlockCopy] = ()
        """That the running step still has to make."""
        self._right: dict[CacheSequence, list[int]] = {}
        """What the slots of a sequence must hold."""
        self._random = worker.kernel.random(f"gpu {worker.name}")

    def holds(self, group: int, block: int, content: Content | Unit) -> bool:
        """Whether a block has what it must hold: a snapshot the last slot of its content, one of a unit all of the unit's."""
        if isinstance(content, Unit):
            right = tracer.encoder_slots(self._input_of(content.root), content.root.tenant_salt)
            return self.slots[group].read(content.unit_blocks, content.num_tokens) == right
        tokens: list[int] = []
        at: Content | None = content
        while at is not None:
            tokens[:0] = memoryview(at.tokens).cast("I").tolist()
            at = at.parent
        slots: list[int] = []
        tracer.extend(slots, self._root_digest(content.root), tokens)
        found = self.slots[group].block(block)
        return found == slots[-len(found) :]

    def _input_of(self, root: Any) -> list[int]:
        """The encoder's input that a root names; empty if it names none."""
        return self.worker.world.inputs.get(root.input_digest, [])

    def _root_digest(self, root: Any) -> int:
        return tracer.root_digest(root.tenant_salt, self._input_of(root))

    def shutdown(self, wait: bool = True) -> None:
        """As a thread pool's."""

    def execute(self, step: Step) -> list[PartResult]:
        """As a StepRunner's; the loop hands steps to `launch` instead."""
        raise AssertionError("steps are launched")

    def launch(self, step: Step) -> asyncio.Future[Any]:
        """Begin a step; the future gets what it sampled."""
        worker = self.worker
        assert not self.is_busy
        self.is_busy = True
        state = worker.cache.state
        in_step = [sequence for sequence in state.sequences.values() if sequence.in_step]
        self._generations = [list(ledger._generation) for ledger in state.ledgers]
        self._copies = step.copies
        counts = worker.world.counts
        counts["blocks copied for forks"] += len(step.copies)
        parts = []
        for part in step.parts:
            (sequence,) = [one for one in in_step if _is_of(part, one)]
            parts.append(_Part(part, sequence))
            counts["rings turned"] += any(0 in table for table in part.block_tables)
            if part.state is not None:
                counts["states from a snapshot"] += bool(part.state.source not in (0, part.state.running))
                counts["states copied"] += bool(part.state.snapshot)
            if part.encoder is not None:
                counts["encoders run"] += bool(part.encoder.token_ids)
                counts["encoders run for a decoder that hits"] += bool(part.encoder.token_ids and part.start)
        future = worker.loop.create_future()
        kernel, draw = worker.kernel, self._random
        seconds = self.step_seconds * (0.3 + draw.expovariate(1.2))
        total = sum(len(part.token_ids) for part in step.parts)
        if draw.random() < 0.4:
            kernel.after(seconds * draw.random(), self._compute, parts, draw.randrange(total + 1))
        kernel.after(seconds, self._finish, parts, total, future)
        return future

    def _finish(self, parts: list[_Part], total: int, future: asyncio.Future[Any]) -> None:
        if self.worker.is_dead:
            return
        self._compute(parts, total)
        results = [PartResult() if part.asked.sampling is None else self._sample(part) for part in parts]
        self.worker.deliver(self._complete, future, results)

    def _complete(self, future: asyncio.Future[Any], results: list[PartResult]) -> None:
        self.is_busy = False
        if not future.done():
            future.set_result(results)

    def _compute(self, parts: list[_Part], num_tokens: int) -> None:
        """Write the slots of the first `num_tokens` tokens of the step."""
        if self.worker.is_dead:
            return
        self._make_copies()
        for part in parts:
            count = min(num_tokens, len(part.asked.token_ids))
            num_tokens -= count
            if count > part.num_done:
                self._compute_part(part, count)

    def _make_copies(self) -> None:
        """Before anything of the step is written, but not before it is written first: the blocks must be kept until then."""
        copies, self._copies = self._copies, ()
        for group, source, target in copies:
            self.worker.world.laws.count("no use after free")
            if not (self._is_own(group, source) and self._is_own(group, target)):
                what = f"block {source} of group {group} to {target}"
                self._fail("no use after free", f"the running step copies {what}, and one of them is free by now")
                return
            if self.worker.cache.state.ledgers[group]._contents[target] is not None:
                self._fail("sealed blocks never change", f"a fork has its tail in block {target}, which is sealed")
                return
            self.slots[group].copy(source, target)

    def _compute_part(self, part: _Part, count: int) -> None:
        asked, sequence = part.asked, part.sequence
        first, end = asked.start + part.num_done, asked.start + count
        right = self._right.setdefault(sequence, [])
        tracer.extend(right, self._root_digest(sequence.root), sequence.tokens[len(right) : end])
        if not self._may_touch(part, first, end):
            return
        self.worker.world.laws.count("exact hits")
        if not self._step_state(part, first, end) or not self._step_unit(part):
            return
        for group, (slots, table) in enumerate(zip(self.slots, asked.block_tables, strict=False)):
            begin = self._begin(group, first)
            read = slots.read(table, first)
            if read[begin:] != right[begin:first]:
                position = next(i for i in range(begin, first) if read[i] != right[i])
                block = table[position // self.block_size]
                found = "nothing" if read[position] is None else "something else"
                where = f"at position {position}, in block {block} of group {group}"
                self._fail("exact hits", f"{sequence!r} reads {found} {where}")
                return
            slots.write(table, first, right[first:end])
        part.num_done = count

    def _step_state(self, part: _Part, first: int, end: int) -> bool:
        """Read the state before the part, and write the one after it. Half a part has no state."""
        asked, right, states = part.asked, self._right[part.sequence], self.slots[-1]
        if asked.state is None:
            return True
        if first == asked.start:
            (read,) = states.block(asked.state.source) if asked.state.source else (None,)
            if read != (right[first - 1] if first else None):
                found = "none" if read is None else "another one"
                needed = f"{part.sequence!r} needs the state after {first} tokens"
                self._fail("exact hits", f"{needed} and reads {found}: {asked.state}")
                return False
        if end == asked.start + len(asked.token_ids):
            for block in (asked.state.running, asked.state.snapshot):
                if block:
                    states.write([block], 0, right[end - 1 : end])
        return True

    def _step_unit(self, part: _Part) -> bool:
        """Run the encoder, if the part brings its input, and read its output."""
        if part.asked.encoder is None:
            return True
        table, num_tokens, token_ids = part.asked.encoder
        slots, root = self.slots[self._unit_group], part.sequence.root
        if token_ids and not part.num_done:
            slots.write(table, 0, tracer.encoder_slots(token_ids, root.tenant_salt))
        read = slots.read(table, num_tokens)
        if read != tracer.encoder_slots(self._input_of(root), root.tenant_salt):
            found = "an unwritten slot" if None in read else "another one"
            self._fail("exact hits", f"{part.sequence!r} reads {found} in the unit of its encoder's input: {table}")
            return False
        return True

    def _may_touch(self, part: _Part, first: int, end: int) -> bool:
        """Whether the blocks that a part names for the tokens first … end − 1 are still what they were when the step was launched,
        and those that it writes are nobody else's."""
        asked, laws = part.asked, self.worker.world.laws
        laws.count("no use after free")
        laws.count("sealed blocks never change")
        named: list[tuple[int, int]] = []
        written: list[tuple[int, int]] = []
        for group in self._attending:
            laws.count("no step reads a hole")
            table, size = asked.block_tables[group], self.block_size
            begin, last = self._begin(group, first) // size, -(-end // size)
            if 0 in table[begin:last]:
                needed = f"a running step of {part.sequence!r} needs all from index {begin} on"
                self._fail("no step reads a hole", f"{needed}: {table}")
                return False
            named += [(group, block) for block in table[begin:last]]
            written += [(group, block) for block in table[first // size : last]]
        if asked.state is not None:
            group, (_, running, snapshot) = len(self.slots) - 1, asked.state
            named += [(group, block) for block in asked.state if block]
            written += [(group, running), *([(group, snapshot)] if snapshot else [])]
        if asked.encoder is not None:
            unit = [(self._unit_group, block) for block in asked.encoder.table]
            named += unit
            written += unit if asked.encoder.token_ids else []
        for group, block in named:
            if not self._is_own(group, block):
                what = f"block {block} of group {group}, which is no longer its own"
                self._fail("no use after free", f"a running step of {part.sequence!r} names {what}")
                return False
        for group, block in written:
            ledger = self.worker.cache.state.ledgers[group]
            if not block or ledger._num_users[block] > 1 or ledger._contents[block] is not None:
                what = f"block {block} of group {group}: {ledger._num_users[block]} sequences have it"
                self._fail("sealed blocks never change", f"{part.sequence!r} writes {what}")
                return False
        return True

    def _is_own(self, group: int, block: int) -> bool:
        """Whether a block that the running step names is in use, and was not granted again since the launch."""
        ledger = self.worker.cache.state.ledgers[group]
        return ledger._generation[block] == self._generations[group][block] and bool(ledger._num_users[block])

    def _begin(self, group: int, position: int) -> int:
        """The first position that the token at a position sees."""
        kind = self.worker.cache.settings.groups[group]
        return max(0, position - kind.window + 1) if isinstance(kind, WindowGroup) else 0

    def _sample(self, part: _Part) -> PartResult:
        """What follows all that the last group of attention reads; of what left its window, what was right there. The last slot
        is that of the state, if there is one."""
        asked = part.asked
        assert asked.sampling is not None
        end = asked.start + len(asked.token_ids)
        read: list[int | None] = list(self._right[part.sequence][:end])
        if self._attending:
            begin = self._begin(self._attending[-1], end - 1)
            read[begin:] = self.slots[self._attending[-1]].read(asked.block_tables[-1], end)[begin:]
        if asked.state is not None:
            read[-1:] = self.slots[-1].block(asked.state.running)
        if asked.num_candidates:
            return PartResult(candidates=candidates_after(read, asked.num_candidates))
        ways = (asked.sampling, *asked.forks)
        token, *forks = (SampledToken(tracer.next_token(read, way.seed)) for way in ways)
        return PartResult(token, forks=tuple(forks))

    def _fail(self, law: str, message: str) -> None:
        self.worker.world.fail(law, f"{self.worker.name}: {message}")


def _is_of(part: SequencePart, sequence: CacheSequence) -> bool:
    """Whether the part has the blocks of the sequence."""
    if part.block_tables:
        return part.block_tables[0] is sequence.tables[0]
    assert part.state is not None
    use = sequence.state_use(part.start + len(part.token_ids))
    return use is not None and use.running == part.state.running
