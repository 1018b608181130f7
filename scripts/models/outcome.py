"""The outcome of a type's trial."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Result(Enum):
    """The result of a type."""

    RUNS = "runs"
    REFUSED = "refused"
    NOT_BUILT = "not built here"
    WRONG = "WRONG"


NATIVE = "native"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the document."""

    kind: str
    result: Result
    reason: str = ""
    """kvpool's message if it is refused, the library's if it cannot be built; a restriction, if any, if it runs."""
    native: str = ""
    """NATIVE, or why a type that runs does not run natively."""
    seconds: float = 0.0
