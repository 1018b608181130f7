"""The worlds that are searched: which requests there are, and what may go wrong how often."""

from __future__ import annotations

import sys

from tests.exhaustive.search import Found, Search, tell
from tests.exhaustive.world import Budget, Start, Wanted

_SHARED = (Wanted("a", (1, 2), 2, worker=0), Wanted("b", (1, 2, 3), 2, worker=0))
"""Both on one worker; b begins with a's prompt: it waits for it, hits it, or computes it too. Both then grow: preemption."""
_APART = (Wanted("a", (1, 2), 2, worker=0), Wanted("b", (1, 2), 1, worker=1))
"""One on each worker, with the same text."""
_RIVALS = (Wanted("a", (1, 2, 3), 1, worker=0), Wanted("b", (5, 6), 2, worker=0))
"""Both on one worker, different texts: the second evicts what the first has left."""
_PARTING = (Wanted("a", (1, 2, 3, 4, 5, 6, 7), 2, worker=0), Wanted("b", (1, 2, 8), 1, worker=0))
"""Both on one worker; b parts from a after the first block: its window or state there is named for b, or is written again."""
_FORKED = (Wanted("a", (1, 2, 3), 3, worker=0),)
"""It has a full block and a tail when it can be forked."""
_SINGLE = (Wanted("a", (1, 2), 2, worker=0),)

STARTS: dict[str, Start] = {
    "single, restart": Start(_SINGLE, Budget(restarts=1)),
    "shared, 2 faults": Start(_SHARED, Budget(faults=2)),
    "shared, fault, two groups": Start(_SHARED, Budget(faults=1), num_blocks=(4, 3)),
    "single, restart, two groups": Start(_SINGLE, Budget(restarts=1), num_blocks=(3, 4)),
    "parting, fault, window": Start(_PARTING, Budget(faults=1), num_blocks=(8, 6), windows=(0, 3)),
    "single, restart, window": Start(_SINGLE, Budget(restarts=1), num_blocks=(3, 5), windows=(0, 3)),
    "parting, fault, state": Start(_PARTING, Budget(faults=1), num_blocks=(8, 6), grid=2),
    "single, restart, state": Start(_SINGLE, Budget(restarts=1), num_blocks=(3, 4), grid=2),
    "2 forks": Start(_FORKED, Budget(forks=2), num_blocks=(9,)),
    "fork, fault": Start(_FORKED, Budget(forks=1, faults=1), num_blocks=(7,)),
    "fork, restart": Start(_FORKED, Budget(forks=1, restarts=1), num_blocks=(6,)),
    "fork, fault, window": Start(_FORKED, Budget(forks=1, faults=1), num_blocks=(7, 9), windows=(0, 3)),
    "fork, fault, state": Start(_FORKED, Budget(forks=1, faults=1), num_blocks=(7, 7), grid=2),
    "single, restart, fault": Start(_SINGLE, Budget(restarts=1, faults=1)),
    "single, restart, 2 faults, at once": Start(_SINGLE, Budget(restarts=1, faults=2), at_once=True),
    "shared, restart, 2 faults, at once": Start(_SHARED, Budget(restarts=1, faults=2), at_once=True),
}
"""Those of `make prove KIND=exhaustive`: minutes, all together."""

LARGE: dict[str, Start] = {
    "fork, move": Start(_FORKED, Budget(forks=1, moves=1), num_blocks=(6,)),
    "2 forks, restart, fault, at once": Start(
        _FORKED, Budget(forks=2, restarts=1, faults=1), num_blocks=(9,), at_once=True
    ),
    "single, move": Start(_SINGLE, Budget(moves=1)),
    "rivals, 2 faults, cancel": Start(_RIVALS, Budget(faults=2, cancels=1)),
    "apart, restart, 2 faults, at once": Start(_APART, Budget(restarts=1, faults=2), at_once=True),
    "apart, move": Start(_APART, Budget(moves=1)),
    "shared, restart": Start(_SHARED, Budget(restarts=1)),
}
"""Those that are searched only when they are named."""


def search(name: str) -> tuple[tuple[int, int, int, int, int], float, dict[str, int], list[str]]:
    """All that can become of a world: its counts, seconds of the processor, how often what has happened, and what is wrong, in
    words. A line on standard error tells of each level."""

    def on_level(found: Found) -> None:
        counts = f"{found.num_transitions} transitions, {found.num_visits} visits, {found.num_waiting} to come"
        print(f"{name}, depth {found.depth}: {counts}", file=sys.stderr, flush=True)

    start = {**STARTS, **LARGE}[name].begin()
    found = Search(start).run(on_level)
    wrong = [] if found.is_complete else ["too many states: given up"]
    if found.broken:
        wrong = [found.broken, "the shortest way there:", *(f"  {line}" for line in tell(start, found.trace))]
    counts = found.num_states, found.num_visits, found.num_transitions, found.num_ends, found.depth
    # Without types of these modules, which pickle knows by other numbers elsewhere.
    return counts, found.seconds, dict(found.kinds), wrong
