"""A fake GPU: runs the tracer model's steps late, in pieces, and goes on while its process is frozen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpool.worker_service.cache.ledger import BlockLedger
from kvpool.worker_service.cache.sequence import CacheSequence
from kvpool.worker_service.engine.step import PartResult, SampledToken, SequencePart, Step
from tests import tracer

if TYPE_CHECKING:
    from tests.simulation.worker import WorkerProcess


class _Part:
    """A sequence's part of the running step."""

    def __init__(self, part: SequencePart, sequence: CacheSequence, generations: list[list[int]]) -> None:
        self.tokens = part.token_ids
        self.start = part.start
        self.tables = [part.block_table, *part.further_tables]
        """By group, like `generations`."""
        self.samples = part.sampling is not None
        self.sequence = sequence
        self.generations = generations
        """Of the tables' blocks when the step was launched."""
        self.num_done = 0


class Gpu:
    """The KV slots of one worker's process, and the step that is running on them. Dies with its process."""

    def __init__(self, worker: WorkerProcess, num_blocks: tuple[int, ...], block_size: int) -> None:
        self.worker = worker
        self.block_size = block_size
        self.slots = [tracer.Slots(count, block_size) for count in num_blocks]
        """By group."""
        self.step_seconds = 0.02
        self.is_busy = False
        self.num_steps = 0
        self._right: dict[CacheSequence, list[int]] = {}
        """What the slots of a sequence must hold."""
        self._random = worker.kernel.random(f"gpu {worker.name}")
        self._launches = 0

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
        state = worker.cache._state
        by_table = {id(sequence.tables[0]): sequence for sequence in state.sequences.values() if sequence.tables}
        parts = []
        for part in step.parts:
            sequence = by_table[id(part.block_table)]
            generations = [
                [ledger._generation[block] for block in table]
                for ledger, table in zip(state.ledgers, (part.block_table, *part.further_tables), strict=True)
            ]
            parts.append(_Part(part, sequence, generations))
            worker.world.counts["rings turned"] += any(0 in table for table in part.block_tables)
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
        results = [PartResult(self._sample(part) if part.samples else None) for part in parts]
        self.worker.deliver(self._complete, future, results)

    def _complete(self, future: asyncio.Future[Any], results: list[PartResult]) -> None:
        self.is_busy = False
        if not future.done():
            future.set_result(results)

    def _compute(self, parts: list[_Part], num_tokens: int) -> None:
        """Write the slots of the first `num_tokens` tokens of the step."""
        if self.worker.is_dead:
            return
        for part in parts:
            count = min(num_tokens, len(part.tokens))
            num_tokens -= count
            if count > part.num_done:
                self._compute_part(part, count)

    def _compute_part(self, part: _Part, count: int) -> None:
        first, end = part.start + part.num_done, part.start + count
        right = self._right.setdefault(part.sequence, [])
        root = tracer.root_digest(part.sequence.root.tenant_salt)
        tracer.extend(right, root, part.sequence.tokens[len(right) : end])
        if not self._may_touch(part, end):
            return
        laws = self.worker.world.laws
        laws.count("exact hits")
        for group, (slots, table) in enumerate(zip(self.slots, part.tables, strict=True)):
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

    def _may_touch(self, part: _Part, end: int) -> bool:
        """Whether the blocks that the step names are still what they were when it was launched."""
        laws = self.worker.world.laws
        laws.count("no use after free")
        laws.count("sealed blocks never change")
        return all(
            self._may_touch_group(part, end, ledger, part.generations[ledger.group])
            for ledger in self.worker.cache._state.ledgers
        )

    def _begin(self, group: int, position: int) -> int:
        """The first position that the token at a position sees."""
        window = self.worker.plan.windows[group]
        return max(0, position - window + 1) if window else 0

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

    def _sample(self, part: _Part) -> SampledToken:
        """The token after all that the last group reads; of what left its window, what was right there."""
        end = part.start + len(part.tokens)
        begin = self._begin(len(self.slots) - 1, end - 1)
        read = self.slots[-1].read(part.tables[-1], end)
        return SampledToken(tracer.next_token([*self._right[part.sequence][:begin], *read[begin:]]))

    def _fail(self, law: str, message: str) -> None:
        self.worker.world.fail(law, f"{self.worker.name}: {message}")


def executor_of(worker: WorkerProcess) -> Callable[..., Any]:
    """What the loop does with work for the model's thread."""
    return worker.gpu.launch
