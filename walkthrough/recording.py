"""Plays a story to its end, and records each step and the state of the core after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvpool.cache_service.core.integrity import Violation

from .layouts import BLOCK_SIZE, ONE_GROUP, Layout
from .snapshot import GroupView, Snapshot, changed_blocks, take_snapshot
from .worker import Worker


class Story(NamedTuple):
    """A story. `play` lets the worker do one thing, and yields the text of a step: its title, an empty line, and sentences whose
    line breaks mean nothing."""

    name: str
    summary: str
    """Summary in one line."""
    play: Callable[[Worker], Iterator[str]]
    shows_tree: bool = False
    """Whether the picture has the prefix tree, with the names of the blocks."""
    layout: Layout = ONE_GROUP
    """The groups of the worker."""


class StoryStep(NamedTuple):
    """What has happened, and the core before and after it."""

    title: str
    sentences: str
    calls: tuple[str, ...]
    """The calls to the manager with their answers, each with a line for each of its items."""
    before: Snapshot
    after: Snapshot
    violations: tuple[Violation, ...]


def record(story: Story) -> list[StoryStep]:
    """Play a story on a fresh manager and audit it after every step; ends early at a step that breaks a law.

    Raises UnexpectedAnswer if the core or the cache side does something else than the story needs, though no law is broken.
    """
    worker = Worker(story.layout)
    steps: list[StoryStep] = []
    before = take_snapshot(worker)
    play = story.play(worker)
    while text := _next_text(play, worker):
        title, _, sentences = text.partition("\n")
        violations = tuple(worker.manager.check().violations)
        after = take_snapshot(worker)
        steps.append(StoryStep(title, " ".join(sentences.split()), worker.take_calls(), before, after, violations))
        if violations:
            break
        before = after
    return steps


def _next_text(play: Iterator[str], worker: Worker) -> str:
    """Return the text of the next step; empty: there is none. If a broken core has thrown the story off course, it says so."""
    try:
        return next(play, "")
    except Exception as error:
        if not worker.manager.check().violations:
            raise
        return f"The story cannot go on\n\n{type(error).__name__}: {error}."


def as_object(story: Story, steps: Sequence[StoryStep]) -> dict[str, Any]:
    """Return the story and its steps as plain values for JSON, for the page that shows them.

    A step has `title` and `text`; the lines of its `calls`; the state after them, by group; and `violations` of laws. A group has
    `title` and `kind`; `blocks` without the null block, `tables` and `free_list`, with the fields of the views in `snapshot`; and
    `changed`, the blocks that the step has changed.
    """
    return {"name": story.name, "summary": story.summary, "block_size": BLOCK_SIZE, "steps": list(map(_step, steps))}


def _step(step: StoryStep) -> dict[str, Any]:
    return {
        "title": step.title,
        "text": step.sentences,
        "calls": [line for call in step.calls for line in call.splitlines()],
        "groups": list(map(_group, step.before.groups, step.after.groups)),
        "violations": [violation.message for violation in step.violations],
    }


def _group(before: GroupView, after: GroupView) -> dict[str, Any]:
    return {
        "title": after.kind.title,
        "kind": after.kind.name.lower(),
        "blocks": [block._asdict() for block in after.blocks[1:]],
        "tables": [table._asdict() for table in after.tables],
        "free_list": after.free_list,
        "changed": list(changed_blocks(before, after)),
    }
