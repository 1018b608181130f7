"""Percentiles, rates and the report's JSON, from samples that are known."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from kvpool.load import report
from kvpool.load.arrivals import ClosedLoop, OpenLoop
from kvpool.load.engine import ServedRequest
from kvpool.load.figures import PERCENTILES, Distribution, LoadFigures
from kvpool.load.plan import CacheCase, LoadPlan, Measured
from kvpool.load.sample import Arrived, LoadRun, RequestSample
from kvpool.load.waste import WasteSample
from kvpool.load.workload import DEFAULT_SIZES, LoadWorkload


@pytest.mark.parametrize("count", [1, 2, 3, 10, 99, 100, 101, 1000])
def test_percentiles_are_those_of_numpy(count: int) -> None:
    generator = random.Random(count)
    samples = [generator.expovariate(1.0) for _ in range(count)]
    found = Distribution.of(samples)
    assert Distribution.of([]) is None
    assert found is not None
    assert list(found.percentiles) == pytest.approx([float(np.percentile(samples, p)) for p in PERCENTILES])
    assert found.median == pytest.approx(float(np.median(samples)))
    assert (found.count, found.least, found.most) == (count, min(samples), max(samples))


def sample(due: float, *arrived: tuple[float, int], cached: int | None = 32, turn: int = 1) -> RequestSample:
    """A complete request of 64 prompt tokens."""
    return RequestSample(turn, due, 64, cached, [Arrived(*each) for each in arrived], is_complete=True)


def test_times_are_from_when_a_request_was_due() -> None:
    one = sample(10.0, (10.5, 1), (10.7, 1), (11.3, 3))
    assert one.time_to_first_token == pytest.approx(0.5)
    assert one.end_to_end == pytest.approx(1.3)
    # Three tokens that came together after 0.6 s count as one every 0.2 s.
    assert one.inter_token() == pytest.approx([0.2, 0.2, 0.2, 0.2])
    assert one.num_generated_tokens == 5
    # Tokens that come with the first have no time of their own.
    assert sample(0.0, (1.0, 5)).inter_token() == []


def test_figures_count_complete_requests_only() -> None:
    """A refused request and one that was broken off have times, but not the ones that are asked about."""
    refused = RequestSample(1, 0.0, 64, refusal="full")
    broken = RequestSample(1, 0.0, 64, 0, [Arrived(0.001, 1)])
    run = LoadRun(2.0, [sample(0.0, (0.5, 1), (1.0, 3)), refused, broken], num_planned=4)
    figures = LoadFigures.of([run])
    assert figures.time_to_first_token is not None
    assert (figures.time_to_first_token.count, figures.time_to_first_token.median) == (1, 0.5)
    (found,) = figures.runs
    assert (found.num_planned, found.num_complete, found.num_refused) == (4, 1, 1)
    assert (found.num_prompt_tokens, found.num_cached_tokens, found.num_generated_tokens) == (64, 32, 4)
    assert (found.hit_rate, found.generated_per_second, found.all_per_second) == (0.5, 2.0, 34.0)


def test_rates_are_medians_of_runs_and_times_are_of_all_requests() -> None:
    runs = [LoadRun(seconds, [sample(0.0, (seconds, 1), (seconds, 9))], 1) for seconds in (1.0, 2.0, 5.0)]
    figures = LoadFigures.of(runs)
    assert (figures.seconds.median, figures.seconds.least, figures.seconds.most) == (2.0, 1.0, 5.0)
    assert figures.generated_per_second.median == 5.0
    assert figures.time_to_first_token is not None
    assert figures.time_to_first_token.count == 3


def test_an_engine_that_does_not_tell_has_no_hit_rate() -> None:
    figures = LoadFigures.of([LoadRun(1.0, [sample(0.0, (1.0, 1), cached=None), sample(0.0, (1.0, 1))], 2)])
    assert figures.hit_rate is None


def test_turns_are_told_apart_if_there_are_several() -> None:
    samples = [sample(0.0, (0.1 * turn, 1), turn=turn) for turn in (1, 2, 3)]
    found = LoadFigures.of([LoadRun(1.0, samples, 3)]).by_turn
    assert {turn: times.median for turn, times in found.items()} == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})
    assert LoadFigures.of([LoadRun(1.0, samples[:1], 1)]).by_turn == {}


def measured(error: Exception | None = None) -> Measured:
    plan = LoadPlan(
        LoadWorkload.CHATS, ClosedLoop(2), 2, DEFAULT_SIZES[LoadWorkload.CHATS], repetitions=2, cases=tuple(CacheCase)
    )
    waste = [WasteSample(100, 97, 20), WasteSample(0, 0, 20), WasteSample(300, 297, 20)]
    run = LoadRun(2.0, [sample(0.0, (0.5, 1), (1.0, 3)), sample(0.0, (0.7, 4), turn=2)], 12, error, waste)
    return Measured(
        plan, ServedRequest("tiny", range(10), 100), {CacheCase.COLD: [run, run], CacheCase.WARM: [run]}, error
    )


def test_the_json_has_every_figure_under_its_name() -> None:
    found = json.loads(json.dumps(report.as_json(measured())))
    assert found.keys() == {"plan", "model", "cases", "error"}
    assert (found["model"], found["error"]) == ("tiny", None)
    assert found["plan"] == {
        "workload": "chats", "num_conversations": 2, "prefix_tokens": 0, "own_tokens": 100, "generated_tokens": 50, "turns": 6,
        "arrivals": {"loop": "closed", "num_users": 2}, "repetitions": 2, "cases": ["cold", "warm"], "warm_up": True, "seed": 0,
    }  # fmt: skip
    assert found["cases"].keys() == {"cold", "warm"}
    cold = found["cases"]["cold"]
    assert cold.keys() == {
        "time_to_first_token", "time_to_first_token_by_turn", "inter_token", "end_to_end", "seconds",
        "generated_tokens_per_second", "hit_rate", "waste", "runs",
    }  # fmt: skip
    times = {"count", "mean_ms", "least_ms", "p50_ms", "p90_ms", "p99_ms", "most_ms"}
    for name in ("time_to_first_token", "inter_token", "end_to_end"):
        assert cold[name].keys() == times
    assert cold["time_to_first_token"]["p50_ms"] == pytest.approx(600)
    assert cold["time_to_first_token_by_turn"].keys() == {"1", "2"}
    assert cold["hit_rate"] == {"median": 0.5, "least": 0.5, "most": 0.5}
    assert cold["waste"] == pytest.approx({"num_samples": 4, "waste": 6 / 400, "waste_max": 0.03, "reserve": 0.1})
    assert [run["num_complete"] for run in cold["runs"]] == [2, 2]
    assert cold["runs"][0].keys() == {
        "seconds", "num_planned", "num_complete", "num_refused", "num_prompt_tokens", "num_cached_tokens",
        "num_generated_tokens", "hit_rate", "generated_tokens_per_second", "tokens_per_second",
    }  # fmt: skip


def test_an_open_loop_and_an_error_are_told_too() -> None:
    plan = LoadPlan(LoadWorkload.SHARED, OpenLoop(5.0, seed=3), 2, DEFAULT_SIZES[LoadWorkload.SHARED])
    found = json.loads(json.dumps(report.as_json(Measured(plan, error=ValueError("gone")))))
    assert found["plan"]["arrivals"] == {
        "loop": "open", "rate": 5.0, "pattern": "poisson", "max_in_flight": 256, "seed": 3,
    }  # fmt: skip
    assert (found["model"], found["cases"], found["error"]) == (None, {}, "gone")
