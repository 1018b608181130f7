"""`python -m tests.mutants.simulation N`: the simulator's seeds 0 … N − 1, up to the first broken law."""

from __future__ import annotations

import sys

from tests.simulation.world import World


def main(num_seeds: int) -> int:
    """Exit status: 1 if a law is broken, which the last line names."""
    for seed in range(num_seeds):
        try:
            violation = World(seed).run().violation
        except Exception as error:
            print(f"BROKEN seed {seed}: {type(error).__name__}: {error}".splitlines()[0])
            return 1
        if violation is not None:
            print(f"BROKEN seed {seed}: {violation.law}")
            return 1
    print(f"{num_seeds} seeds, no law broken")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
