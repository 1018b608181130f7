"""`python -m kvpool.walkthrough STORY`: shows the core of the manager, one operation at a time."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

import kvpool.process.quiet_start  # noqa: F401

from . import allocation, chain, eviction, fork, pool, prefix, sharing, state, window
from .picture import WIDTH_MAX, draw_legend, draw_step
from .recording import Story, StoryStep, as_object, record
from .worker import UnexpectedAnswer

_IN_ORDER: Final = (pool, sharing, allocation, prefix, chain, eviction, window, state, fork)
STORIES: Final[dict[str, Story]] = {module.STORY.name: module.STORY for module in _IN_ORDER}
"""Stories by name, in the order in which they are best read."""

EXIT_BROKEN: Final = 1
EXIT_USAGE: Final = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Show one story, or list them.

    Returns the exit status: 0; 1 if the core broke a law, or output failed; 2 for an unknown story; 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="kvpool walkthrough",
        description="Stories on the manager's real core and a worker's real cache side, step by step: blocks, tables, free list.",
        epilog="\n".join(_list_lines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("story", nargs="?", metavar="STORY", help="one of those below; without it they are listed")
    parser.add_argument("--json", action="store_true", help="print the story as one JSON object")
    options = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        return _run(options.story, as_json=options.json)
    except BrokenPipeError:
        # The reader of our output has left (| head): nothing to say, and Python must not complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN


def _run(name: str | None, *, as_json: bool) -> int:
    if name is None:
        print(
            "kvpool walkthrough STORY shows the manager's real core and a worker's real cache side, step by step. The stories:\n"
        )
        print("\n".join(_list_lines()))
        print(
            "\nThe page of `kvpool gateway` plays them with keys, under Learn. In a terminal, a pager turns the steps:"
        )
        print("FORCE_COLOR=1 kvpool walkthrough STORY | less -R")
        sys.stdout.flush()
        return 0
    if name not in STORIES:
        print(f"kvpool walkthrough: no story {name!r}; there are: {', '.join(STORIES)}", file=sys.stderr)
        return EXIT_USAGE
    story = STORIES[name]
    try:
        steps = record(story)
    except UnexpectedAnswer as error:
        print(f"kvpool walkthrough: {name}: {error}", file=sys.stderr)
        return EXIT_BROKEN
    if as_json:
        print(json.dumps(as_object(story, steps)))
        sys.stdout.flush()
    else:
        _print_all(story, steps)
    return EXIT_BROKEN if any(step.violations for step in steps) else 0


def _print_all(story: Story, steps: Sequence[StoryStep]) -> None:
    """Print the story, in colours on a terminal."""
    terminal = Console(highlight=False)
    width = min(WIDTH_MAX, os.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH_MAX
    pages = [[Text(f"{story.name}: {story.summary}"), *draw_legend(story, width)]]
    pages += [draw_step(story, steps, index, width) for index in range(len(steps))]
    for line in (line for page in pages for line in (*page, Text(), Text())):
        line.rstrip()
        terminal.print(line, soft_wrap=True)
    sys.stdout.flush()


def _list_lines() -> list[str]:
    longest = max(map(len, STORIES))
    return [f"  {story.name:<{longest}}   {story.summary}" for story in STORIES.values()]


if __name__ == "__main__":
    sys.exit(main())
