"""How often what was reached, of one run or of many."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(kw_only=True)
class Tally:
    """Counters by name, of each kind of thing."""

    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    looks: Counter[str] = field(default_factory=Counter)
    """At laws."""
    reasons: Counter[str] = field(default_factory=Counter)
    cases: Counter[str] = field(default_factory=Counter)
    downlink: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    """Of whatever else happens."""

    def add_counts(self, other: Tally) -> None:
        for kind in fields(Tally):
            getattr(self, kind.name).update(getattr(other, kind.name))
