"""Reports the measurements as one JSON object, or as tables for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .arrivals import ClosedLoop
from .figures import PERCENTILES, Distribution, LoadFigures, Spread
from .plan import LoadPlan, Measured
from .workload import LoadWorkload

METHOD = (
    "Times are from when a request was due, on one monotonic clock; percentiles are exact over all requests (tokens) of all "
    "repetitions, between two samples linearly; rates and hit rates are medians of the repetitions, least and most in brackets. "
    "Tokens that came together count as evenly spread since those before."
)


def as_json(measured: Measured) -> dict[str, object]:
    """Return the report as JSON values. The names are part of the interface; those of times end in their unit."""
    return {
        "plan": measured.plan.as_json(),
        "model": None if measured.served is None else measured.served.model,
        "cases": {case.value: LoadFigures.of(runs).as_json() for case, runs in measured.runs.items()},
        "error": None if measured.error is None else str(measured.error),
    }


def describe(plan: LoadPlan) -> str:
    """Describe the plan in a sentence."""
    sizes = plan.sizes
    shared = f"{sizes.prefix_tokens} shared" if sizes.prefix_tokens else ""
    generated = f"{sizes.generated_tokens} generated tokens"
    if plan.workload is LoadWorkload.MIXED:
        what = f"log-normal length, mean {sizes.own_tokens} + {generated}"
        if shared:
            what += f", half of the longer prompts beginning with {shared} ones"
    elif plan.workload is LoadWorkload.CHATS:
        what = f"{sizes.turns} turns, each + {sizes.own_tokens} + {generated}" + (
            shared and f", after {shared} shared ones"
        )
    else:
        what = (shared and f"{shared} + ") + f"{sizes.own_tokens} own + {generated}"
    noun = "conversation" if plan.workload is LoadWorkload.CHATS else "request"
    arrivals = plan.arrivals
    if isinstance(arrivals, ClosedLoop):
        how = f"{_count(arrivals.num_users, 'user')}, closed loop"
    else:
        how = f"{arrivals.rate:g} a second ({arrivals.pattern}), at most {arrivals.max_in_flight} in flight"
    repetitions = f"{_count(plan.repetitions, 'repetition')}, {' and '.join(plan.cases)}"
    warm_up = "after a warm-up of the same size" if plan.warm_up else "without a warm-up"
    return f"{plan.workload}: {_count(plan.num_conversations, noun)} of {what}; {how}; {repetitions}, {warm_up}"


def tables(measured: Measured) -> RenderableType:
    """Return the report as tables for people."""
    parts: list[RenderableType] = []
    for case, runs in measured.runs.items():
        figures = LoadFigures.of(runs)
        parts += [Text(f"{case}, {_count(len(runs), 'run')}", style="bold"), _times(figures), _rates(figures), Text()]
    parts.append(Text(METHOD, style="dim"))
    return Group(*parts)


def _times(figures: LoadFigures) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("ms", overflow="fold")
    for column in ("mean", *(f"p{percent}" for percent in PERCENTILES), "least", "most", "samples"):
        table.add_column(column, justify="right")
    rows = [
        ("time to first token", figures.time_to_first_token),
        *((f"  turn {turn}", times) for turn, times in figures.by_turn.items()),
        ("inter-token latency", figures.inter_token),
        ("end-to-end latency", figures.end_to_end),
    ]
    for name, times in rows:
        table.add_row(name, *_cells(times))
    return table


def _cells(times: Distribution | None) -> list[str]:
    if times is None:
        return ["–"] * (len(PERCENTILES) + 3) + ["0"]
    columns = (times.mean, *times.percentiles, times.least, times.most)
    return [*(f"{seconds * 1000:,.1f}" for seconds in columns), f"{times.count:,}"]


def _rates(figures: LoadFigures) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="fold")
    table.add_column()
    runs = figures.runs
    complete, planned = sum(run.num_complete for run in runs), sum(run.num_planned for run in runs)
    refused = sum(run.num_refused for run in runs)
    asked = f"{complete:,} of {planned:,} complete" + (f", {refused:,} refused: the engine was full" if refused else "")
    table.add_row("requests", asked)
    table.add_row("seconds of a run", _spread(figures.seconds, "{:,.2f}"))
    table.add_row("generated tokens/s", _spread(figures.generated_per_second, "{:,.1f}"))
    table.add_row("all tokens/s", _spread(Spread.of([run.all_per_second for run in runs]), "{:,.1f}"))
    hit_rate = "unknown" if figures.hit_rate is None else _spread(figures.hit_rate, "{:.1%}")
    table.add_row("hit rate (cached / prompt tokens)", hit_rate)
    if (waste := figures.waste) is not None:
        table.add_row(
            "KV waste ((held − assigned) / held slots)",
            f"{waste.waste:.2%}, at most {waste.waste_max:.2%} of {waste.num_samples} samples; "
            f"unbound reserve as well: {waste.reserve:.1%} of the held slots",
        )
    return table


def _spread(spread: Spread, form: str) -> str:
    text = form.format(spread.median)
    if spread.least == spread.most:
        return text
    return f"{text} ({form.format(spread.least)} to {form.format(spread.most)})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
