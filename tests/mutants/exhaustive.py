"""`python -m tests.mutants.exhaustive N`: the worlds of the exhaustive search, N states of each, up to the first broken law."""

from __future__ import annotations

import sys

from tests.exhaustive.search import Search
from tests.exhaustive.starts import STARTS


def main(max_states: int) -> int:
    """Exit status: 1 if a law is broken, which the last line names."""
    num_states = 0
    for name, start in STARTS.items():
        found = Search(start.begin(), max_states=max_states).run()
        if found.broken:
            print(f"BROKEN {name}, {len(found.trace)} events: {found.broken}".splitlines()[0])
            return 1
        num_states += found.num_states
    print(f"{num_states} states, no law broken")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
