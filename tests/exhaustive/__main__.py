"""Search all worlds, one after the other, each in two processes: python -m tests.exhaustive [NAME …]."""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.exhaustive.search import Found, Search, tell
from tests.exhaustive.starts import LARGE, STARTS

NUM_PROCESSES = 2
SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Says on standard error, from time to time, how far a search has come."""

    def __init__(self) -> None:
        self._said_at = 0.0
        self._said_transitions = 0

    def __call__(self, found: Found) -> None:
        seconds = found.elapsed_seconds - self._said_at
        if seconds < SECONDS_BETWEEN_LINES:
            return
        rate = (found.num_transitions - self._said_transitions) / seconds
        self._said_at, self._said_transitions = found.elapsed_seconds, found.num_transitions
        print(
            f"  depth {found.depth}: {found.num_states} states, {found.num_transitions} transitions ({rate:.0f} a second), "
            f"{found.num_waiting} to go through next",
            file=sys.stderr,
            flush=True,
        )


def main() -> int:
    """Exit status 0 if every law holds in every state of every world."""
    names = sys.argv[1:] or list(STARTS)
    worlds = {**STARTS, **LARGE}
    unknown = [name for name in names if name not in worlds]
    if unknown:
        print(f"no world {unknown[0]!r}; there are: {'; '.join(worlds)}", file=sys.stderr)
        return 2
    began = time.perf_counter()
    is_right = True
    states = transitions = 0
    seconds = 0.0
    kinds: Counter[str] = Counter()
    print(
        f"{'world':44} {'states':>8} {'visits':>8} {'transitions':>12} {'ends':>6} {'depth':>6} {'seconds':>8} {'CPU s':>8}"
    )
    for name in names:
        start = worlds[name].begin()
        found = Search(start, num_processes=NUM_PROCESSES).run(Progress())
        print(
            f"{name:44} {found.num_states:8} {found.num_visits:8} {found.num_transitions:12} {found.num_ends:6} "
            f"{found.depth:6} {found.elapsed_seconds:8.0f} {found.seconds:8.0f}",
            flush=True,
        )
        states += found.num_states
        transitions += found.num_transitions
        seconds += found.seconds
        kinds += found.kinds
        if found.broken:
            is_right = False
            print(f"  {found.broken}\n  the shortest way there:")
            print("\n".join(f"    {line}" for line in tell(start, found.trace)), flush=True)
        elif not found.is_complete:
            is_right = False
            print("  too many states: given up", flush=True)
    elapsed = time.perf_counter() - began
    print(f"{'all':44} {states:8} {'':8} {transitions:12} {'':6} {'':6} {elapsed:8.0f} {seconds:8.0f}")
    print("what happened, and how often:")
    for kind, count in sorted(kinds.items(), key=lambda entry: -entry[1]):
        print(f"  {count:9} {kind}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
