"""What came of trying a type."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Result(Enum):
    """What became of a type."""

    RUNS = "runs"
    REFUSED = "refused"
    NOT_BUILT = "not built here"
    WRONG = "WRONG"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the document."""

    kind: str
    result: Result
    reason: str = ""
    """Our own message where it is refused, the library's where it cannot be built; where it runs, a restriction if any."""
    seconds: float = 0.0
