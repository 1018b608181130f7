"""Encodes a story as plain values for JSON, for the page that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .layouts import Kind, group_title, kind_of
from .recording import Story, StoryStep
from .snapshot import BlockView, GroupView, TableView


def as_object(case: Story, steps: Sequence[StoryStep]) -> dict[str, Any]:
    """Return the story and its steps.

    A step has `title` and `text`, the `calls` that were made with their answers, the state after them, and `violations` of laws.

    The state of a group has `blocks` by number, without the null block, each with its `owners`, whose tables name it; `tables` in
    the order in which the sequences came; `free_list`, the next block to be granted first; and `changed`, the blocks that the step
    has changed. With one group these are in the step itself, otherwise in its `groups`, each with a `title` and a `kind`. Tables of
    a group with a window or a state have `entries`, each an index and a block, instead of `blocks`; `scratch`; and `boundaries`, in
    tokens, at which the sequence still has to name something. The `words` of a snapshot show after how many tokens it was taken.
    """
    return {
        "name": case.name,
        "summary": case.summary,
        "block_size": steps[0].after.block_size,
        "steps": [_step(step) for step in steps],
    }


def _step(step: StoryStep) -> dict[str, Any]:
    groups = [_group(before, after) for before, after in zip(step.before.groups, step.after.groups, strict=True)]
    if len(groups) > 1:
        heads = [
            {"title": group_title(group.group), "kind": kind_of(group.group).name.lower()}
            for group in step.after.groups
        ]
        state = {"groups": [{**head, **group} for head, group in zip(heads, groups, strict=True)]}
    else:
        (state,) = groups
    return {
        "title": step.scene.title,
        "text": " ".join(step.scene.sentences.split()),
        "calls": list(step.calls),
        **state,
        "violations": [violation.message for violation in step.violations],
    }


def _group(before: GroupView, after: GroupView) -> dict[str, Any]:
    owners: dict[int, list[str]] = {}
    for table in after.tables:
        for block in (*(entry.block for entry in table.entries), *table.scratch):
            owners.setdefault(block, []).append(table.sequence_id)
    return {
        "blocks": [_block(block, owners.get(block.block, [])) for block in after.blocks[1:]],
        "tables": [_table(table, kind_of(after.group)) for table in after.tables],
        "free_list": list(after.free_list),
        "changed": [new.block for old, new in zip(before.blocks, after.blocks, strict=True) if old != new],
    }


def _block(block: BlockView, owners: list[str]) -> dict[str, Any]:
    return {
        "block": block.block,
        "state": block.state.name.lower(),
        "ref_count": block.ref_count,
        "generation": block.generation,
        "sealed": block.sealed,
        "words": ["after", str(block.num_tokens)] if block.num_tokens else list(block.words),
        "owners": owners,
    }


def _table(table: TableView, kind: Kind) -> dict[str, Any]:
    of_group: dict[str, Any] = {"blocks": [entry.block for entry in table.entries]}
    if kind is not Kind.FULL:
        of_group = {
            "entries": [{"index": entry.table_index, "block": entry.block} for entry in table.entries],
            "scratch": list(table.scratch),
            "boundaries": list(table.boundaries),
        }
    return {
        "sequence": table.sequence_id,
        **of_group,
        "num_tokens": table.num_tokens,
        "num_cached_tokens": table.num_cached_tokens,
        "num_computed_tokens": table.num_computed_tokens,
    }
