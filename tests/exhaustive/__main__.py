"""Search all worlds, two at a time, each in a process of its own: python -m tests.exhaustive [NAME …]."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.exhaustive.starts import LARGE, STARTS, search

NUM_PROCESSES = 2
COLUMNS = "{:44} {:>8} {:>8} {:>12} {:>6} {:>6} {:>8}"


def main() -> int:
    """Exit status 0 if every law holds in every state of every world."""
    names = sys.argv[1:] or list(STARTS)
    unknown = [name for name in names if name not in {**STARTS, **LARGE}]
    if unknown:
        print(f"no world {unknown[0]!r}; there are: {'; '.join((*STARTS, *LARGE))}", file=sys.stderr)
        return 2
    began = time.perf_counter()
    all_right = True
    states = transitions = 0
    all_seconds = 0.0
    all_kinds: Counter[str] = Counter()
    print(COLUMNS.format("world", "states", "visits", "transitions", "ends", "depth", "CPU s"))
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        # The largest is the last in the list.
        searches = {pool.submit(search, name): name for name in reversed(names)}
        for done in as_completed(searches):
            counts, seconds, kinds, wrong = done.result()
            print(COLUMNS.format(searches[done], *counts, round(seconds)), *wrong, sep="\n  ", flush=True)
            states, transitions = states + counts[0], transitions + counts[2]
            all_seconds += seconds
            all_kinds.update(kinds)
            all_right = all_right and not wrong
    print(COLUMNS.format("all", states, "", transitions, "", "", round(all_seconds)))
    print(f"in {time.perf_counter() - began:.0f} s. What happened, and how often:")
    for kind, count in all_kinds.most_common():
        print(f"  {count:9} {kind}")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
