"""What a long proof tells: its progress, and in the end its result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

Tell = Callable[[str, float, float], None]
"""What is going on, how much of it is done, of how much."""


class Result(Protocol):
    """What came of it."""

    violations: list[str]

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        ...


ResultT = TypeVar("ResultT", bound=Result)


@contextmanager
def told(
    starting: str, *columns: ProgressColumn, is_worth_a_line: Callable[[float, float], bool] = lambda done, of: True
) -> Iterator[Tell]:
    """A bar on a terminal, else lines on stderr. Yields whom to tell.

    `columns` stand behind the bar; without a terminal only what `is_worth_a_line` is a line, each once.
    """
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), *columns, TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task(starting, total=None)
        last = ""

        def tell(what: str, done: float, of: float) -> None:
            nonlocal last
            bar.update(task, description=what, completed=done, total=of)
            line = f"{what}: {done:.0f} of {of:.0f}"
            if not console.is_terminal and line != last and is_worth_a_line(done, of):
                last = line
                print(line, file=sys.stderr, flush=True)

        yield tell


def tell_result(
    result: ResultT, around: dict[str, Any], show: Callable[[ResultT, Console], None], *, as_json: bool
) -> int:
    """On stdout, for people or as one JSON object. Returns the exit status: 1 if anything is violated."""
    if as_json:
        print(json.dumps({**result.as_json(), "facts": around}, indent=1))
    else:
        console = Console()
        show(result, console)
        for violation in result.violations:
            console.print(f"VIOLATION: {violation}", markup=False, soft_wrap=True)
        if not result.violations:
            console.print("No violation.")
        if around:
            print(around)
    return 1 if result.violations else 0
