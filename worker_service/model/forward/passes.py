"""A step as forward passes: one, unless more rows of prompts are wanted than may stand as logits at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...engine.step import PromptRows, SequencePart


class PassPart(NamedTuple):
    """What one forward pass computes of a part of the step."""

    part_index: int
    """Of the part in the step."""
    part: SequencePart
    """The part itself, or a piece of its tokens. Pieces follow each other; only the last one samples."""


def passes(parts: Sequence[SequencePart], max_prompt_rows: int) -> Iterator[list[PassPart]]:
    """The forward passes of a step, in order; in none of them are more than max_prompt_rows rows of prompts wanted.

    The same tokens are computed in the same order as in one pass, in smaller chunks. Parts of which no prompt row is wanted are
    in the first pass.
    """
    pending = [PassPart(index, part) for index, part in enumerate(parts)]
    while pending:
        room = max_prompt_rows
        now: list[PassPart] = []
        later: list[PassPart] = []
        for index, part in pending:
            rows = part.prompt_rows
            if rows is None or len(rows.targets) <= room:
                now.append(PassPart(index, part))
                room -= 0 if rows is None else len(rows.targets)
            elif room:
                piece, rest = _cut(part, rows, room)
                now.append(PassPart(index, piece))
                later.append(PassPart(index, rest))
                room = 0
            else:
                later.append(PassPart(index, part))
        yield now
        pending = later


def _cut(part: SequencePart, rows: PromptRows, num_rows: int) -> tuple[SequencePart, SequencePart]:
    """Cut behind the first `num_rows` of the rows wanted."""
    end = rows.first + num_rows
    piece = part._replace(
        token_ids=part.token_ids[:end], sampling=None, prompt_rows=rows._replace(targets=rows.targets[:num_rows])
    )
    rest = part._replace(
        token_ids=part.token_ids[end:],
        start=part.start + end,
        prompt_rows=rows._replace(first=0, targets=rows.targets[num_rows:]),
    )
    return piece, rest
