"""Search all worlds, one after the other, each in two processes: python -m tests.exhaustive [NAME …]."""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.exhaustive.search import Found, Search, tell
from tests.exhaustive.starts import LARGE, STARTS
from tests.exhaustive.world import World
from tests.telling import told

NUM_PROCESSES = 2
COLUMNS = "{:44} {:>8} {:>8} {:>12} {:>6} {:>6} {:>8} {:>8}"


def search(name: str, start: World) -> Found:
    """All that can become of a world, with a line on standard error for each level."""
    with told(name) as tell_progress:

        def on_level(found: Found) -> None:
            what = f"{name}, depth {found.depth}, {found.num_transitions} transitions, visits"
            tell_progress(what, found.num_visits, found.num_visits + found.num_waiting)

        return Search(start, num_processes=NUM_PROCESSES).run(on_level)


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
    print(COLUMNS.format("world", "states", "visits", "transitions", "ends", "depth", "seconds", "CPU s"))
    for name in names:
        start = worlds[name].begin()
        found = search(name, start)
        counts = found.num_states, found.num_visits, found.num_transitions, found.num_ends, found.depth
        print(COLUMNS.format(name, *counts, round(found.elapsed_seconds), round(found.seconds)), flush=True)
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
    print(COLUMNS.format("all", states, "", transitions, "", "", round(elapsed), round(seconds)))
    print("what happened, and how often:")
    for kind, count in kinds.most_common():
        print(f"  {count:9} {kind}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
