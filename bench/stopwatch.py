"""Host time by kind of work."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class Stopwatch:
    """Seconds by kind of call; a call inside another one counts only for the inner kind."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._began: list[float] = []

    def begin(self) -> None:
        self._began.append(time.perf_counter())

    def end(self, kind: str) -> None:
        spent = time.perf_counter() - self._began.pop()
        self.seconds[kind] += spent
        if self._began:
            self._began[-1] += spent


@contextmanager
def timed_calls(watch: Stopwatch, *calls: tuple[Any, str, str]) -> Iterator[None]:
    """Time each (owner, name, kind) within the context: a function of a module, or a method of a class or an object."""
    with ExitStack() as stack:
        for owner, name, kind in calls:
            original = getattr(owner, name)

            def timed(*arguments: Any, original: Any = original, kind: str = kind, **options: Any) -> Any:
                watch.begin()
                try:
                    return original(*arguments, **options)
                finally:
                    watch.end(kind)

            is_own = name in vars(owner)
            setattr(owner, name, timed)
            if is_own:
                stack.callback(setattr, owner, name, original)
            else:
                stack.callback(delattr, owner, name)
        yield
