"""Plays a story to its end, and records each step and the state of the core after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvpool.cache_service.core.integrity import Violation
from kvpool.cache_service.core.messages import Layout

from .layouts import ONE_GROUP
from .snapshot import Snapshot, take_snapshot
from .worker import Worker


class Scene(NamedTuple):
    """The text of a story after one of its calls. Line breaks in the sentences mean nothing."""

    title: str
    sentences: str


class Story(NamedTuple):
    """A story. `play` makes one call of the worker before each scene that it yields."""

    name: str
    summary: str
    """Summary in one line."""
    play: Callable[[Worker], Iterator[Scene]]
    shows_tree: bool = False
    """Whether the picture has the prefix tree, with the names of the blocks."""
    layout: Layout = ONE_GROUP
    """The groups of the worker."""


class StoryStep(NamedTuple):
    """One call, its text, and the core before and after it."""

    scene: Scene
    calls: tuple[str, ...]
    before: Snapshot
    after: Snapshot
    violations: tuple[Violation, ...]


def record(case: Story) -> list[StoryStep]:
    """Play a case on a fresh manager and audit it after every step; ends early at a step that breaks a law.

    Raises UnexpectedAnswer if the core does not answer as the story needs, though no law is broken.
    """
    worker = Worker(case.layout)
    steps: list[StoryStep] = []
    before = take_snapshot(worker)
    play = case.play(worker)
    while (scene := _next_scene(play, worker)) is not None:
        violations = tuple(worker.check().violations)
        after = take_snapshot(worker)
        steps.append(StoryStep(scene, worker.take_calls(), before, after, violations))
        if violations:
            break
        before = after
    return steps


def _next_scene(play: Iterator[Scene], worker: Worker) -> Scene | None:
    """Return the next scene; None at the end. If a broken core has thrown the story off course, the scene says so."""
    try:
        return next(play, None)
    except Exception as error:
        if not worker.check().violations:
            raise
        return Scene("The story cannot go on", f"{type(error).__name__}: {error}.")
