"""The seeds of `make test`: few that reach together all that many reach, and what is rare twice.

`python -m tests.simulation --seeds 160 --choose` prints others, once a change has taken something rare out of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from typing import Final

TIMES: Final = 2
"""How often everything is to be reached, where so many seeds reach it."""
SEEDS: Final = (7, 8, 11, 20, 35, 40, 46, 70, 73, 85, 89, 94, 106, 125, 133, 134, 153)


def choose(reached: Mapping[int, Set[str]]) -> list[int]:
    """A small set of seeds, of those whose reach is given: the one that adds most, again and again (greedy set cover)."""
    missing = Counter(name for names in reached.values() for name in names)
    for name, count in missing.items():
        missing[name] = min(count, TIMES)
    chosen: list[int] = []
    while any(missing.values()):
        left = (seed for seed in reached if seed not in chosen)
        chosen.append(max(left, key=lambda seed: sum(missing[name] > 0 for name in reached[seed])))
        missing.subtract({name: 1 for name in reached[chosen[-1]] if missing[name]})
    return sorted(chosen)
