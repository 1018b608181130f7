"""A fake GPU: runs the tracer model's steps late, in pieces, and goes on while its process is frozen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpool.worker_service.cache.entry import BlockCopy
from kvpool.worker_service.cache.groups.state import StateGroup
from kvpool.worker_service.cache.groups.unit import Unit, UnitGroup, UnitLedger
from kvpool.worker_service.cache.groups.window import WindowGroup
from kvpool.worker_service.cache.ledger import BlockLedger
from kvpool.worker_service.cache.sequence import CacheSequence
from kvpool.worker_service.cache.settings import CacheSettings
from kvpool.worker_service.step import (
    BeamCandidate,
    BeamCandidates,
    PartResult,
    SampledToken,
    SequencePart,
    Step,
)
from tests import tracer

if TYPE_CHECKING:
    from tests.simulation.worker import WorkerProcess


class _Part:
    """A sequence's part of the running step."""

    def __init__(self, part: SequencePart, sequence: CacheSequence, ledgers: tuple[BlockLedger, ...]) -> None:
        self.tokens = part.token_ids
        self.start = part.start
        self.tables = part.block_tables
        """By group of layers that attend, like `generations`."""
        self.state = part.state
        self.encoder = part.encoder
        self.samples = part.sampling is not None
        self.ways = () if part.sampling is None else (part.sampling, *part.forks)
        """How its next token is drawn, and those of its forks."""
        self.num_candidates = part.num_candidates
        self.sequence = sequence
        self.generations = [
            [ledger._generation[block] for block in table] for ledger, table in zip(ledgers, self.tables, strict=False)
        ]
        """Of the tables' blocks when the step was launched."""
        self.generations_of_state = [ledgers[-1]._generation[block] for block in part.state or ()]
        self.generations_of_unit: list[int] = []
        if part.encoder is not None:
            (units,) = [ledger for ledger in ledgers if isinstance(ledger, UnitLedger)]
            self.generations_of_unit = [units._generation[block] for block in part.encoder.table]
        self.num_done = 0


class _Copy:
    """A copy that the running step begins with."""

    def __init__(self, copy: BlockCopy, ledgers: tuple[BlockLedger, ...]) -> None:
        self.group, self.source, self.target = copy
        self.generations = self.present(ledgers)

    def present(self, ledgers: tuple[BlockLedger, ...]) -> list[int]:
        """Generations of its blocks now."""
        return [ledgers[self.group]._generation[block] for block in (self.source, self.target)]


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
        self._unit_group = next(
            (ledger for ledger, group in enumerate(settings.groups) if isinstance(group, UnitGroup)), None
        )
        self.step_seconds = 0.02
        self.is_busy = False
        self.num_steps = 0
        self._copies: list[_Copy] = []
        self._right: dict[CacheSequence, list[int]] = {}
        """What the slots of a sequence must hold."""
        self._random = worker.kernel.random(f"gpu {worker.name}")
        self._launches = 0

    def holds(self, group: int, block: int, right: list[int]) -> bool:
        """Whether a block has what the slots of a block of tokens must hold. A snapshot is the last of them."""
        found = self.slots[group].block(block)
        return found == right[-len(found) :]

    def holds_unit(self, group: int, unit: Unit) -> bool:
        """Whether the blocks of a unit have what they must hold."""
        right = tracer.encoder_slots(self.worker.world.inputs[unit.root.input_digest], unit.root.tenant_salt)
        return self.slots[group].read(unit.unit_blocks, unit.num_tokens) == right

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
        self._copies = [_Copy(copy, state.ledgers) for copy in step.copies]
        worker.world.counts["blocks copied for forks"] += len(step.copies)
        parts = []
        for part in step.parts:
            (sequence,) = [one for one in in_step if _is_of(part, one)]
            parts.append(_Part(part, sequence, state.ledgers))
            counts = worker.world.counts
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
        total = sum(len(part.tokens) for part in parts)
        if draw.random() < 0.4:
            kernel.after(seconds * draw.random(), self._compute, parts, draw.randrange(total + 1))
        kernel.after(seconds, self._finish, parts, total, future)
        return future

    def _finish(self, parts: list[_Part], total: int, future: asyncio.Future[Any]) -> None:
        if self.worker.is_dead:
            return
        self._compute(parts, total)
        self.num_steps += 1
        results = [self._sample(part) if part.samples else PartResult() for part in parts]
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
            count = min(num_tokens, len(part.tokens))
            num_tokens -= count
            if count > part.num_done:
                self._compute_part(part, count)

    def _make_copies(self) -> None:
        """Before anything of the step is written, but not before it is written first: the blocks must be kept until then."""
        copies, self._copies = self._copies, []
        ledgers = self.worker.cache.state.ledgers
        for copy in copies:
            self.worker.world.laws.count("no use after free")
            ledger = ledgers[copy.group]
            is_own = ledger._num_users[copy.source] and ledger._num_users[copy.target]
            if not is_own or copy.present(ledgers) != copy.generations:
                what = f"block {copy.source} of group {copy.group} to {copy.target}"
                self._fail("no use after free", f"the running step copies {what}, and one of them is free by now")
                return
            if ledger._contents[copy.target] is not None:
                self._fail("sealed blocks never change", f"a fork has its tail in block {copy.target}, which is sealed")
                return
            self.slots[copy.group].copy(copy.source, copy.target)

    def _compute_part(self, part: _Part, count: int) -> None:
        first, end = part.start + part.num_done, part.start + count
        right = self._right.setdefault(part.sequence, [])
        salt = part.sequence.root.tenant_salt
        root = tracer.root_digest(salt)
        if part.encoder is not None:
            root = tracer.encoder_digest(self._input_of(part.sequence), salt)
        tracer.extend(right, root, part.sequence.tokens[len(right) : end])
        if not self._may_touch(part, end):
            return
        laws = self.worker.world.laws
        laws.count("exact hits")
        if part.state is not None and not self._step_state(part, first, end):
            return
        if part.encoder is not None and not self._step_unit(part):
            return
        for group, (slots, table) in enumerate(zip(self.slots, part.tables, strict=False)):
            begin = self._begin(group, first)
            read = slots.read(table, first)
            if read[begin:] != right[begin:first]:
                position = next(i for i in range(begin, first) if read[i] != right[i])
                block = table[position // self.block_size]
                found = "nothing" if read[position] is None else "something else"
                where = f"at position {position}, in block {block} of group {group}"
                self._fail("exact hits", f"{part.sequence!r} reads {found} {where}")
                return
            slots.write(table, first, right[first:end])
        part.num_done = count

    def _step_state(self, part: _Part, first: int, end: int) -> bool:
        """Read the state before the part, and write the one after it. Half a part has no state."""
        assert part.state is not None
        right, states = self._right[part.sequence], self.slots[-1]
        if first == part.start:
            (read,) = states.block(part.state.source) if part.state.source else (None,)
            if read != (right[first - 1] if first else None):
                found = "none" if read is None else "another one"
                self._fail(
                    "exact hits",
                    f"{part.sequence!r} needs the state after {first} tokens and reads {found}: {part.state}",
                )
                return False
        if end == part.start + len(part.tokens):
            for block in (part.state.running, part.state.snapshot):
                if block:
                    states.write([block], 0, right[end - 1 : end])
        return True

    def _input_of(self, sequence: CacheSequence) -> list[int]:
        """The encoder's input that a sequence has by its root."""
        return self.worker.world.inputs[sequence.root.input_digest]

    def _step_unit(self, part: _Part) -> bool:
        """Run the encoder, if the part brings its input, and read its output."""
        assert part.encoder is not None
        table, num_tokens, token_ids = part.encoder
        assert self._unit_group is not None
        slots = self.slots[self._unit_group]
        if token_ids and not part.num_done:
            slots.write(table, 0, tracer.encoder_slots(token_ids, part.sequence.root.tenant_salt))
        right = tracer.encoder_slots(self._input_of(part.sequence), part.sequence.root.tenant_salt)
        read = slots.read(table, num_tokens)
        if read != right:
            found = "an unwritten slot" if None in read else "another one"
            self._fail("exact hits", f"{part.sequence!r} reads {found} in the unit of its encoder's input: {table}")
            return False
        return True

    def _may_touch(self, part: _Part, end: int) -> bool:
        """Whether the blocks that the step names are still what they were when it was launched."""
        laws = self.worker.world.laws
        laws.count("no use after free")
        laws.count("sealed blocks never change")
        ledgers = self.worker.cache.state.ledgers
        if part.encoder is not None and not self._may_touch_unit(part, ledgers):
            return False
        return self._may_touch_state(part, ledgers[-1]) and all(
            self._may_touch_group(part, end, ledgers[group], part.generations[group]) for group in self._attending
        )

    def _may_touch_unit(self, part: _Part, ledgers: tuple[BlockLedger, ...]) -> bool:
        assert part.encoder is not None
        assert self._unit_group is not None
        ledger = ledgers[self._unit_group]
        for block, generation in zip(part.encoder.table, part.generations_of_unit, strict=True):
            if ledger._generation[block] != generation or not ledger._num_users[block]:
                self._fail(
                    "no use after free",
                    f"a running step of {part.sequence!r} names block {block} of a unit, which is no longer its own",
                )
                return False
            if part.encoder.token_ids and (ledger._num_users[block] > 1 or ledger._contents[block] is not None):
                self._fail(
                    "sealed blocks never change",
                    f"{part.sequence!r} writes block {block} of its unit: {ledger._num_users[block]} sequences have it",
                )
                return False
        return True

    def _may_touch_state(self, part: _Part, ledger: BlockLedger) -> bool:
        if part.state is None:
            return True
        _, running, snapshot = part.state
        for block, generation in zip(part.state, part.generations_of_state, strict=True):
            if block and (ledger._generation[block] != generation or not ledger._num_users[block]):
                self._fail(
                    "no use after free",
                    f"a running step of {part.sequence!r} names block {block} for its state, which is no longer its own",
                )
                return False
        for block in (running, *([snapshot] if snapshot else [])):
            if not block or ledger._num_users[block] > 1 or ledger._contents[block] is not None:
                self._fail(
                    "sealed blocks never change",
                    f"{part.sequence!r} writes block {block}, its state: {ledger._num_users[block]} sequences have it",
                )
                return False
        return True

    def _begin(self, group: int, position: int) -> int:
        """The first position that the token at a position sees."""
        kind = self.worker.cache.settings.groups[group]
        return max(0, position - kind.window + 1) if isinstance(kind, WindowGroup) else 0

    def _may_touch_group(self, part: _Part, end: int, ledger: BlockLedger, generations: list[int]) -> bool:
        size, table = self.block_size, part.tables[ledger.group]
        begin = self._begin(ledger.group, part.start + part.num_done) // size
        self.worker.world.laws.count("no step reads a hole")
        if 0 in table[begin : -(-end // size)]:
            self._fail(
                "no step reads a hole", f"a running step of {part.sequence!r} needs all from index {begin} on: {table}"
            )
            return False
        for index in range(begin, -(-end // size)):
            block = table[index]
            if ledger._generation[block] != generations[index] or not ledger._num_users[block]:
                self._fail(
                    "no use after free",
                    f"a running step of {part.sequence!r} names block {block}, which is no longer its own",
                )
                return False
        for index in range((part.start + part.num_done) // size, -(-end // size)):
            block = table[index]
            if block == 0 or ledger._num_users[block] > 1 or ledger._contents[block] is not None:
                self._fail(
                    "sealed blocks never change",
                    f"{part.sequence!r} writes block {block}: {ledger._num_users[block]} tables name it",
                )
                return False
        return True

    def _sample(self, part: _Part) -> PartResult:
        """What follows all that the last group of attention reads; of what left its window, what was right there. The last slot
        is that of the state, if there is one."""
        end = part.start + len(part.tokens)
        read: list[int | None] = list(self._right[part.sequence][:end])
        if self._attending:
            begin = self._begin(self._attending[-1], end - 1)
            read[begin:] = self.slots[self._attending[-1]].read(part.tables[-1], end)[begin:]
        if part.state is not None:
            read[-1:] = self.slots[-1].block(part.state.running)
        if part.num_candidates:
            best = tracer.best_tokens(read, part.num_candidates)
            return PartResult(
                candidates=BeamCandidates([BeamCandidate(token_id, score, score) for token_id, score in best], [])
            )
        token, *forks = (SampledToken(tracer.next_token(read, way.seed)) for way in part.ways)
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


def executor_of(worker: WorkerProcess) -> Callable[..., Any]:
    """What the loop does with work for the model's thread."""
    return worker.gpu.launch
