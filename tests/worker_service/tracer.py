"""A model whose text depends on every KV slot it reads: any stale, foreign or unwritten slot changes the next token.

Slot (block, offset) holds a digest of its token, its position and the digest of the slot before it, which is read through the
block table. So the digest at the last position stands for everything before it, and each output has one right value.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence as List

from kvpool.worker_service.engine.sampling_params import TokenLogprobs
from kvpool.worker_service.engine.step import BadLogits, PartResult, SampledToken, SequencePart, Step

VOCAB_SIZE = 50_000
_MASK = (1 << 61) - 1


def _mix(before: int, token: int, position: int) -> int:
    return (before * 6364136223846793005 + token * 1442695040888963407 + position * 2654435761 + 97) & _MASK


def expected_text(prompt: List[int], count: int) -> list[int]:
    """The one right continuation."""
    digest = 0
    tokens = list(prompt)
    for position, token in enumerate(tokens):
        digest = _mix(digest, token, position)
    for _ in range(count):
        token = digest % VOCAB_SIZE
        digest = _mix(digest, token, len(tokens))
        tokens.append(token)
    return tokens[len(prompt) :]


class TracerModel:
    """A StepRunner over `num_blocks` blocks of slots that start unwritten."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_forwarded = 0
        self.num_steps = 0
        self.fail_next = False
        self.bad_behind: dict[int, BadLogits] = {}
        """Tokens behind which logits are bad if anybody looks at them, and how; the position is filled in."""
        self.bad_rows: set[int] = set()
        """Tokens of which the model computes no finite numbers, wherever they stand."""
        self.gate: threading.Event | None = None
        """If set, a step waits for it: a slow device."""
        self.step_seconds = 0.0
        """How long a step takes at least."""
        self._slots: list[int | None] = [None] * (num_blocks * block_size)

    def execute(self, step: Step) -> list[PartResult]:
        if self.gate is not None:
            assert self.gate.wait(60)
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device fell off the bus")
        self.num_steps += 1
        written: set[int] = set()
        results: list[PartResult] = []
        for part in step.parts:
            tokens, start, table = part.token_ids, part.start, part.block_table
            digest = 0 if start == 0 else self._read(table, start - 1)
            for position, token in enumerate(tokens, start):
                slot = self._slot(table, position)
                assert slot not in written, "two sequences write one slot in one step"
                written.add(slot)
                digest = _mix(digest, token, position)
                self._slots[slot] = digest
            self.num_forwarded += len(tokens)
            targets = [] if part.prompt_rows is None else part.prompt_rows.targets
            told = [TokenLogprobs(-float(target), []) for target in targets]
            result = PartResult(None if part.sampling is None else SampledToken(digest % VOCAB_SIZE), told)
            bad = self._bad_logits(part)
            results.append(result if bad is None else PartResult(bad_logits=bad))
        return results

    def _bad_logits(self, part: SequencePart) -> BadLogits | None:
        """The first bad ones that are looked at, then the first that nobody looks at."""
        rows = (
            []
            if part.prompt_rows is None
            else [part.prompt_rows.first + i for i in range(len(part.prompt_rows.targets))]
        )
        rows += [len(part.token_ids) - 1] * (part.sampling is not None)
        for row in rows:
            if part.token_ids[row] in self.bad_behind:
                return self.bad_behind[part.token_ids[row]]._replace(position=part.start + row + 1)
        for position, token in enumerate(part.token_ids, part.start):
            if token in self.bad_rows:
                return BadLogits(position + 1, math.nan)
        return None

    def _slot(self, table: List[int], position: int) -> int:
        block = table[position // self.block_size]
        assert block != 0, "the null block is never written"
        return block * self.block_size + position % self.block_size

    def _read(self, table: List[int], position: int) -> int:
        digest = self._slots[self._slot(table, position)]
        assert digest is not None, "an unwritten slot was read"
        return digest
