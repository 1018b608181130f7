"""Progress of a long proof: a bar on a terminal, else lines on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

Tell = Callable[[str, float, float], None]
"""What is going on, how much of it is done, of how much."""


@contextmanager
def told(
    starting: str, *columns: ProgressColumn, is_worth_a_line: Callable[[float, float], bool] = lambda done, of: True
) -> Iterator[Tell]:
    """Yields whom to tell. `columns` stand behind the bar; without a terminal only what `is_worth_a_line` is a line, each once."""
    console = Console(stderr=True)
    with Progress(TextColumn("{task.description}"), BarColumn(), *columns, TimeElapsedColumn(), console=console) as bar:
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
