"""`python -m tests.mutants.searches simulation|exhaustive N`: up to the first broken law, which the last line names; exit status 1.

The simulator's seeds 0 … N − 1; the worlds of the exhaustive search, N states of each.
"""

from __future__ import annotations

import sys

from tests.exhaustive.search import Search
from tests.exhaustive.starts import STARTS
from tests.simulation.world import World


def simulate(num_seeds: int) -> str | None:
    """The broken law, and where; None if there is none."""
    for seed in range(num_seeds):
        try:
            violation = World(seed).run().violation
        except Exception as error:
            return f"seed {seed}: {type(error).__name__}: {error}"
        if violation is not None:
            return f"seed {seed}: {violation.law}"
    return None


def search(max_states: int) -> str | None:
    """The broken law, and where; None if there is none."""
    for name, start in STARTS.items():
        result = Search(start.begin(), max_states=max_states).run()
        if result.broken:
            return f"{name}, {len(result.trace)} events: {result.broken}"
    return None


if __name__ == "__main__":
    broken = {"simulation": simulate, "exhaustive": search}[sys.argv[1]](int(sys.argv[2]))
    print(f"BROKEN {broken}".splitlines()[0] if broken else "no law broken")
    sys.exit(broken is not None)
