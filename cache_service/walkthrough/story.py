"""A case as an object of plain values, for JSON: what a page shows of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .recording import Case, Step
from .snapshot import Snapshot


def as_object(case: Case, steps: Sequence[Step]) -> dict[str, Any]:
    """The story and its steps.

    Of each step: `title` and `text`, the `calls` that were made with their answers, and the state after them. `blocks` by number,
    the null block left out, with the `owners` whose tables name each; `tables` in the order in which the sequences came;
    `free_list` from the next to be granted on; `changed`: blocks that the step has changed; `violations` of laws.
    """
    return {
        "name": case.name,
        "summary": case.summary,
        "block_size": steps[0].after.block_size,
        "steps": [_step(step) for step in steps],
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "title": step.scene.title,
        "text": " ".join(step.scene.sentences.split()),
        "calls": list(step.calls),
        **_state(step.after),
        "changed": [
            after.block for before, after in zip(step.before.blocks, step.after.blocks, strict=True) if before != after
        ],
        "violations": [violation.message for violation in step.violations],
    }


def _state(snapshot: Snapshot) -> dict[str, Any]:
    owners: dict[int, list[str]] = {}
    for table in snapshot.tables:
        for entry in table.entries:
            owners.setdefault(entry.block, []).append(table.sequence_id)
    return {
        "blocks": [
            {
                "block": block.block,
                "state": block.state.name.lower(),
                "ref_count": block.ref_count,
                "generation": block.generation,
                "sealed": block.sealed,
                "words": list(block.words),
                "owners": owners.get(block.block, []),
            }
            for block in snapshot.blocks[1:]
        ],
        "tables": [
            {
                "sequence": table.sequence_id,
                "blocks": [entry.block for entry in table.entries],
                "num_tokens": table.num_tokens,
                "num_cached_tokens": table.num_cached_tokens,
                "num_computed_tokens": table.num_computed_tokens,
            }
            for table in snapshot.tables
        ],
        "free_list": list(snapshot.free_list),
    }
