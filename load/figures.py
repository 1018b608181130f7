"""Computes figures of runs: exact percentiles over all samples, rates, hit rates."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from .sample import LoadRun, RequestSample
from .waste import Waste, summarise

PERCENTILES: Final = (50, 90, 99)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of ascending values, at least one. Interpolates linearly at rank (n − 1) · percent / 100, as numpy does
    by default."""
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """All samples of one time, in seconds."""

    count: int
    mean: float
    least: float
    most: float
    percentiles: tuple[float, ...]
    """Percentiles in seconds, in the order of PERCENTILES."""

    @classmethod
    def of(cls, samples: Iterable[float]) -> Distribution | None:
        """Summarise the samples; None: there are none."""
        ordered = sorted(samples)
        if not ordered:
            return None
        return cls(
            count=len(ordered),
            mean=statistics.fmean(ordered),
            least=ordered[0],
            most=ordered[-1],
            percentiles=tuple(percentile(ordered, percent) for percent in PERCENTILES),
        )

    @property
    def median(self) -> float:
        """The 50th percentile."""
        return self.percentiles[PERCENTILES.index(50)]

    def as_json(self) -> dict[str, float]:
        """Return the figures in milliseconds. The names are part of the interface."""
        percentiles = {f"p{percent}": value for percent, value in zip(PERCENTILES, self.percentiles, strict=True)}
        times = {"mean": self.mean, "least": self.least, **percentiles, "most": self.most}
        return {"count": self.count} | {f"{name}_ms": seconds * 1000 for name, seconds in times.items()}


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and largest value of one figure over the runs."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise the values, at least one."""
        return cls(statistics.median(values), min(values), max(values))

    def as_json(self) -> dict[str, float]:
        """Return the figures as JSON values. The names are part of the interface."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RunFigures:
    seconds: float
    num_planned: int
    num_complete: int
    num_refused: int
    num_prompt_tokens: int
    """Prompt tokens of the complete requests; the figures below also count only these."""
    num_cached_tokens: int | None
    """Prompt tokens that the cache served; None: the engine does not report it."""
    num_generated_tokens: int

    @classmethod
    def of(cls, run: LoadRun) -> RunFigures:
        complete = run.complete
        cached = [sample.num_cached_tokens for sample in complete]
        return cls(
            seconds=run.seconds,
            num_planned=run.num_planned,
            num_complete=len(complete),
            num_refused=run.num_refused,
            num_prompt_tokens=sum(sample.num_prompt_tokens for sample in complete),
            num_cached_tokens=None if None in cached else sum(count or 0 for count in cached),
            num_generated_tokens=sum(sample.num_generated_tokens for sample in complete),
        )

    @property
    def hit_rate(self) -> float | None:
        """Cached tokens over all prompt tokens; None: unknown."""
        if self.num_cached_tokens is None or not self.num_prompt_tokens:
            return None
        return self.num_cached_tokens / self.num_prompt_tokens

    @property
    def generated_per_second(self) -> float:
        """Generated tokens per second."""
        return self.num_generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def all_per_second(self) -> float:
        """Tokens of prompts, cached ones included, and answers per second."""
        return (self.num_prompt_tokens + self.num_generated_tokens) / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, object]:
        """Return the figures as JSON values. The names are part of the interface."""
        return {
            **asdict(self),
            "hit_rate": self.hit_rate,
            "generated_tokens_per_second": self.generated_per_second,
            "tokens_per_second": self.all_per_second,
        }


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Figures over all runs of one case: times over all their requests, rates as the median of the runs."""

    runs: tuple[RunFigures, ...]
    time_to_first_token: Distribution | None
    by_turn: dict[int, Distribution]
    """Time to first token by turn; empty if there is only one turn."""
    inter_token: Distribution | None
    end_to_end: Distribution | None
    waste: Waste | None

    @classmethod
    def of(cls, runs: Sequence[LoadRun]) -> LoadFigures:
        """Compute the figures of at least one run."""
        samples = [sample for run in runs for sample in run.complete]
        return cls(
            runs=tuple(RunFigures.of(run) for run in runs),
            time_to_first_token=Distribution.of(sample.time_to_first_token for sample in samples),
            by_turn=_by_turn(samples),
            inter_token=Distribution.of(gap for sample in samples for gap in sample.inter_token()),
            end_to_end=Distribution.of(sample.end_to_end for sample in samples),
            waste=summarise([sample for run in runs for sample in run.waste]),
        )

    @property
    def seconds(self) -> Spread:
        """Duration of the runs in seconds."""
        return Spread.of([run.seconds for run in self.runs])

    @property
    def generated_per_second(self) -> Spread:
        """Generated tokens per second of the runs."""
        return Spread.of([run.generated_per_second for run in self.runs])

    @property
    def hit_rate(self) -> Spread | None:
        """Hit rate of the runs; None: unknown for one of them."""
        rates = [run.hit_rate for run in self.runs]
        return None if None in rates else Spread.of([rate or 0.0 for rate in rates])

    def as_json(self) -> dict[str, object]:
        """Return the figures as JSON values. The names are part of the interface."""
        return {
            "time_to_first_token": _json(self.time_to_first_token),
            "time_to_first_token_by_turn": {str(turn): times.as_json() for turn, times in self.by_turn.items()},
            "inter_token": _json(self.inter_token),
            "end_to_end": _json(self.end_to_end),
            "seconds": self.seconds.as_json(),
            "generated_tokens_per_second": self.generated_per_second.as_json(),
            "hit_rate": _json(self.hit_rate),
            "waste": None if self.waste is None else self.waste._asdict(),
            "runs": [run.as_json() for run in self.runs],
        }


def _by_turn(samples: Sequence[RequestSample]) -> dict[int, Distribution]:
    turns: dict[int, list[float]] = {}
    for sample in samples:
        turns.setdefault(sample.turn, []).append(sample.time_to_first_token)
    by_turn = {turn: Distribution.of(times) for turn, times in sorted(turns.items())}
    return {turn: times for turn, times in by_turn.items() if times is not None} if len(by_turn) > 1 else {}


def _json(figure: Distribution | Spread | None) -> dict[str, float] | None:
    return None if figure is None else figure.as_json()
