"""The tracer model as a StepRunner that can be slow, fail and compute bad logits."""

from __future__ import annotations

import math
import threading
import time

from kvpool.worker_service.step import (
    BadLogits,
    PartResult,
    RowLogprobs,
    SampledToken,
    SequencePart,
    Step,
)
from tests import tracer
from tests.tracer_beams import candidates_after


class TracerModel:
    """A StepRunner over `num_blocks` blocks of slots that start unwritten; `num_unit_blocks`: of the KV of encoder inputs."""

    def __init__(self, num_blocks: int | tuple[int, ...], block_size: int, num_unit_blocks: int = 1) -> None:
        self.block_size = block_size
        self.num_forwarded = 0
        self.num_steps = 0
        self.fail_next = False
        self.bad_behind: dict[int, BadLogits] = {}
        """Tokens after which logits are bad if they are looked at, and how; the position is filled in."""
        self.bad_rows: set[int] = set()
        """Tokens of which the model computes no finite numbers, at any position."""
        self.gate: threading.Event | None = None
        """If set, a step waits for it: a slow device."""
        self.step_seconds = 0.0
        """How long a step takes at least."""
        counts = (num_blocks,) if isinstance(num_blocks, int) else num_blocks
        self._slots = [tracer.Slots(count, block_size) for count in counts]
        self._units = tracer.Slots(num_unit_blocks, block_size)
        self.num_encoded = 0
        """Tokens of encoder inputs."""

    def execute(self, step: Step) -> list[PartResult]:
        if self.gate is not None:
            assert self.gate.wait(60)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device fell off the bus")
        self.num_steps += 1
        for copy in step.copies:
            self._slots[copy.group].copy(copy.source, copy.target)
        written: set[tuple[int, int, int]] = set()
        results: list[PartResult] = []
        for part in step.parts:
            tokens, start = part.token_ids, part.start
            slots = self._read(part, written)
            tracer.extend(slots, self._root(part), tokens)
            for of_group, table in zip(self._slots, part.block_tables, strict=True):
                of_group.write(table, start, slots[start:])
            self.num_forwarded += len(tokens)
            targets = [] if part.prompt_rows is None else part.prompt_rows.targets
            told = [RowLogprobs(-float(target), []) for target in targets]
            result = _end_of(part, slots)._replace(prompt_logprobs=told)
            bad = self._bad_logits(part)
            results.append(result if bad is None else PartResult(bad_logits=bad))
        return results

    def _root(self, part: SequencePart) -> int:
        """What comes before the part's text: nothing, or all of the encoder's output, computed if the part brings its input."""
        encoder = part.encoder
        if encoder is None:
            return tracer.root_digest()
        assert len(encoder.table) == -(-encoder.num_tokens // self.block_size)
        assert 0 not in encoder.table, "the null block is never written"
        if encoder.token_ids:
            assert len(encoder.token_ids) == encoder.num_tokens
            slots: list[int] = []
            tracer.extend(slots, tracer.root_digest(), encoder.token_ids)
            self._units.write(encoder.table, 0, slots)
            self.num_encoded += encoder.num_tokens
        found = self._units.read(encoder.table, encoder.num_tokens)
        assert None not in found, "an unwritten slot of a unit was read"
        return tracer.digest_of(found)

    def _read(self, part: SequencePart, written: set[tuple[int, int, int]]) -> list[int]:
        """The slots before a part, the same in each group; `written`: slots of this step, to which the part's are added."""
        start, end, size = part.start, part.start + len(part.token_ids), self.block_size
        found: list[int] | None = None
        for group, table in enumerate(part.block_tables):
            assert 0 not in table[: -(-end // size)], "the null block is never written"
            slots = [slot for slot in self._slots[group].read(table, start) if slot is not None]
            assert len(slots) == start, "an unwritten slot was read"
            assert found is None or found == slots, "two groups hold different tokens"
            found = slots
            own = {(group, table[position // size], position % size) for position in range(start, end)}
            assert written.isdisjoint(own), "two sequences write one slot in one step"
            written |= own
        assert found is not None
        return found

    def _bad_logits(self, part: SequencePart) -> BadLogits | None:
        """The first bad ones that are looked at, then the first others."""
        asked = part.prompt_rows
        rows = [] if asked is None else [asked.first + index for index in range(len(asked.targets))]
        rows += [len(part.token_ids) - 1] * (part.sampling is not None)
        for row in rows:
            if part.token_ids[row] in self.bad_behind:
                return self.bad_behind[part.token_ids[row]]._replace(position=part.start + row + 1)
        for position, token in enumerate(part.token_ids, part.start):
            if token in self.bad_rows:
                return BadLogits(position + 1, math.nan)
        return None


def _end_of(part: SequencePart, slots: list[int]) -> PartResult:
    """What follows a part."""
    if part.sampling is None:
        return PartResult()
    if part.num_candidates:
        return PartResult(candidates=candidates_after(slots, part.num_candidates))
    token, *forks = (SampledToken(tracer.next_token(slots, way.seed)) for way in (part.sampling, *part.forks))
    return PartResult(token, forks=tuple(forks))
