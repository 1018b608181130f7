"""Divides a step into forward passes: one, unless it needs logits of too many prompt rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...engine.step import PromptRows, SequencePart


class PassPart(NamedTuple):
    """A part of the step in one forward pass."""

    part_index: int
    """Index of the part in the step."""
    part: SequencePart
    """The part, or a piece of its tokens. Only the last piece samples."""


def passes(parts: Sequence[SequencePart], max_prompt_rows: int) -> Iterator[list[PassPart]]:
    """The forward passes of a step, in order, each with at most max_prompt_rows prompt rows.

    The same tokens are computed in the same order as in one pass, in smaller chunks. Parts without prompt rows are in the first
    pass.
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
    """Cut after the first `num_rows` prompt rows."""
    end = rows.first + num_rows
    state = part.state
    piece = part._replace(
        token_ids=part.token_ids[:end],
        sampling=None,
        prompt_rows=rows._replace(targets=rows.targets[:num_rows]),
        state=None if state is None else state._replace(snapshot=0),
    )
    rest = part._replace(
        token_ids=part.token_ids[end:],
        start=part.start + end,
        prompt_rows=rows._replace(first=0, targets=rows.targets[num_rows:]),
        state=None if state is None else state._replace(source=state.running),
    )
    return piece, rest
