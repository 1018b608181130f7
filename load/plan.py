"""The plan of `bench serve`, and its execution from the warm-up to the last repetition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Final

from kvpool.client.errors import InvalidRequest

from .arrivals import Arrivals
from .engine import EngineUnderLoad, ServedRequest
from .load import LoadObserver, run_load
from .sample import LoadRun
from .workload import DEFAULT_SIZES, Conversation, LoadWorkload, RequestSizes, make_workload, require_sense

MAX_REPETITIONS: Final = 1000


class CacheCase(StrEnum):
    """What the cache holds of a workload at its beginning."""

    COLD = "cold"
    """It holds nothing: the tokens are fresh."""
    WARM = "warm"
    """It holds what it has kept of the same requests a moment ago."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A measurement to make. Validated when it is made: InvalidRequest."""

    workload: LoadWorkload
    arrivals: Arrivals
    num_conversations: int
    sizes: RequestSizes
    repetitions: int = 1
    cases: tuple[CacheCase, ...] = (CacheCase.COLD,)
    warm_up: bool = True
    """Whether a run of full size that does not count comes first."""
    seed: int = 0

    def __post_init__(self) -> None:
        require_sense(self.workload, self.sizes, self.num_conversations)
        if not 1 <= self.repetitions <= MAX_REPETITIONS:
            raise InvalidRequest(
                f"repetitions must be 1 to {MAX_REPETITIONS}, got {self.repetitions}", reason="BAD_FIELD"
            )

    @property
    def num_requests(self) -> int:
        """Requests of one run."""
        return self.num_conversations * self.sizes.turns

    def conversations(self, served: ServedRequest, repetition: int) -> list[Conversation]:
        """Make the conversations of one repetition, which shares nothing with the others; 0 is the warm-up. InvalidRequest if the
        model is too small."""
        return make_workload(
            self.workload,
            self.sizes,
            self.num_conversations,
            vocabulary=served.vocabulary,
            max_model_len=served.max_model_len,
            seed=f"{self.seed}/{repetition}",
        )

    def as_json(self) -> dict[str, object]:
        """Return the plan as JSON values. The names are part of the interface."""
        return {
            "workload": self.workload.value,
            "num_conversations": self.num_conversations,
            **asdict(self.sizes),
            "arrivals": {"loop": type(self.arrivals).__name__.removesuffix("Loop").lower(), **asdict(self.arrivals)},
            "repetitions": self.repetitions,
            "cases": [case.value for case in self.cases],
            "warm_up": self.warm_up,
            "seed": self.seed,
        }


@dataclass(slots=True)
class Measured:
    """The runs so far; they are complete when `measure` has returned and there is no `error`."""

    plan: LoadPlan
    served: ServedRequest | None = None
    runs: dict[CacheCase, list[LoadRun]] = field(default_factory=dict)
    error: Exception | None = None
    """Error that ended the measurement early: the last run is incomplete, or it was the warm-up."""


async def measure(
    engine: EngineUnderLoad, plan: LoadPlan, measured: Measured, watch: LoadObserver, on_run: Callable[[str], None]
) -> None:
    """Fill `measured` run by run; `on_run` is called with the name of each run when it begins. Raises an error if the plan itself
    is wrong, or if the engine is absent from the beginning."""
    measured.served = served = await engine.served()
    plan.conversations(served, 0)
    first = 0 if plan.warm_up else 1
    for repetition in range(first, plan.repetitions + 1):
        conversations = plan.conversations(served, repetition)
        for case in plan.cases:
            on_run(f"repetition {repetition} of {plan.repetitions}, {case}" if repetition else f"warm-up, {case}")
            run = await run_load(engine, conversations, plan.arrivals, watch)
            if repetition:
                measured.runs.setdefault(case, []).append(run)
            if run.error is not None:
                measured.error = run.error
                return


def default_sizes(workload: LoadWorkload, **given: int | None) -> RequestSizes:
    """Return the workload's default sizes, replaced by the `given` ones that are not None."""
    return replace(DEFAULT_SIZES[workload], **{name: size for name, size in given.items() if size is not None})
