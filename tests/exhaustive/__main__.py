"""Search all worlds, two at a time: python -m tests.exhaustive [NAME …]."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter

from tests.exhaustive.starts import LARGE, STARTS, search

NUM_PROCESSES = 2


def main() -> int:
    """Exit status 0 if every law holds in every state of every world."""
    names = sys.argv[1:] or list(STARTS)
    unknown = [name for name in names if name not in STARTS and name not in LARGE]
    if unknown:
        print(f"no world {unknown[0]!r}; there are: {'; '.join([*STARTS, *LARGE])}", file=sys.stderr)
        return 2
    began = time.perf_counter()
    is_right = True
    states = transitions = 0
    kinds: Counter[str] = Counter()
    print(f"{'world':24} {'states':>8} {'visits':>8} {'transitions':>12} {'ends':>6} {'depth':>6} {'seconds':>8}")
    with multiprocessing.get_context("spawn").Pool(min(NUM_PROCESSES, len(names))) as pool:
        for name, found, way in pool.imap_unordered(search, names, chunksize=1):
            print(
                f"{name:24} {found.num_states:8} {found.num_visits:8} {found.num_transitions:12} {found.num_ends:6} "
                f"{found.depth:6} {found.seconds:8.0f}",
                flush=True,
            )
            states += found.num_states
            transitions += found.num_transitions
            kinds += found.kinds
            if found.broken:
                is_right = False
                print(f"  {found.broken}\n  the shortest way there:")
                print("\n".join(f"    {line}" for line in way), flush=True)
    print(f"{'all':24} {states:8} {'':8} {transitions:12} {'':6} {'':6} {time.perf_counter() - began:8.0f}")
    print("what happened, and how often:")
    for kind, count in sorted(kinds.items(), key=lambda entry: -entry[1]):
        print(f"  {count:9} {kind}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
