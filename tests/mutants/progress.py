"""Work on many names at once, with a bar, and a line for each that is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")


def in_parallel(
    what: str,
    names: Sequence[str],
    jobs: ThreadPoolExecutor,
    console: Console,
    work: Callable[[str], T],
    say: Callable[[T], str],
) -> list[T]:
    """What the work has returned for each name, in their order; `say`: what is printed of it, in rich's markup."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    results: list[T] = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=len(names))
        for name, result in zip(names, jobs.map(work, names), strict=True):
            results.append(result)
            progress.console.print(f"{name}: {say(result)}", soft_wrap=True, highlight=False)
            progress.advance(task)
    return results
