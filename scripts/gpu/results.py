"""Results of a run: rows with one claim or measurement each, a JSON file per part, lines for the terminal."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

VERSION: Final = 1
"""Version of the files; it changes with the meaning of a field."""
_SHOWN_LINES: Final = 6
"""Characters of a failure on the terminal; the file has all."""


class Outcome(StrEnum):
    """The outcome of a row."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    """The worker would refuse it too; neither a failure nor a pass."""
    NO_TIME = "no time left"


@dataclass(frozen=True, slots=True)
class Row:
    """One claim or one measurement."""

    name: str
    outcome: Outcome = Outcome.PASSED
    detail: str = ""
    """Why it was refused or failed."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Measurements, for JSON; names end in their unit."""


@dataclass(slots=True)
class Report:
    """A part that is complete, or was stopped at the deadline."""

    part: str
    machine: dict[str, Any]
    """Device and versions, so that each file is self-contained."""
    tiny: bool
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """Wall-clock time, ISO 8601."""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Rows of each outcome."""
        counted = Counter(row.outcome for row in self.rows)
        return {outcome.value: counted[outcome] for outcome in Outcome}

    @property
    def is_good(self) -> bool:
        """Something was tried, all of it completed, and nothing failed."""
        return bool(self.rows) and not any(row.outcome in (Outcome.FAILED, Outcome.NO_TIME) for row in self.rows)

    def write(self, folder: Path) -> Path:
        """Write it to the folder as PART.json, atomically."""
        content = {
            "version": VERSION,
            "part": self.part,
            "good": self.is_good,
            "tiny": self.tiny,
            "began": self.began,
            "seconds": round(self.seconds, 3),
            "machine": self.machine,
            "counts": self.counts,
            "rows": [_plain(asdict(row)) for row in self.rows],
        }
        folder.mkdir(parents=True, exist_ok=True)
        path, unfinished = folder / f"{self.part}.json", folder / f".{self.part}.json"
        unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        os.replace(unfinished, path)
        return path

    def lines(self) -> Iterable[str]:
        """Lines for the terminal: counts, every row that did not pass, every figure of the tables."""
        counted = ", ".join(f"{count} {outcome}" for outcome, count in self.counts.items() if count)
        yield f"{self.part}: {counted or 'nothing was tried'}, {self.seconds:.0f} s"
        for (outcome, detail), names in _by_reason(self.rows).items():
            yield f"  {outcome}: {_some(names)}"
            yield from (f"    {line}" for line in detail.splitlines()[-_SHOWN_LINES:])
        for row in self.rows:
            shown = _shown(row.figures)
            if row.outcome is Outcome.PASSED and shown:
                yield f"  {row.name}: {shown}"


def _plain(value: Any) -> Any:
    """The value for JSON, which has no infinity and NaN: a wrong figure must not make the file invalid."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _by_reason(rows: Iterable[Row]) -> dict[tuple[Outcome, str], list[str]]:
    """Rows that did not pass, grouped by reason: a missing kernel is refused a hundred times."""
    found: dict[tuple[Outcome, str], list[str]] = {}
    for row in rows:
        if row.outcome is not Outcome.PASSED:
            found.setdefault((row.outcome, row.detail), []).append(row.name)
    return found


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _shown(figures: dict[str, Any]) -> str:
    """Top-level figures; nested ones are only in the file."""
    simple = {name: value for name, value in figures.items() if isinstance(value, int | float | str)}
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in simple.items()
    )
