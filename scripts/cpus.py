"""python -m scripts.cpus [SETTING …]: run the tests whose results depend on the CPU, also with the kernels of older CPUs.

Libraries select kernels by the CPU; environment variables make them select those of an older one. Prints a table: tests passed,
failed and skipped, and the partition that attention selected. The exit status is 1 if a test failed or could not run.

Settings that this CPU does not support are in the table too.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
CHOICE = "attention_choice"
"""Property of a test in pytest's report: attention's selection for some heads."""
_LIMIT_S = 1800
TESTS = (
    "tests/attention/test_attention_interface.py",
    "tests/attention/test_block_tables.py",
    "tests/attention/test_invariance.py",
    "tests/attention/test_block_tables.py",
    "tests/attention/test_tiles.py",
    "tests/attention/test_torch_attention.py",
    "tests/model/test_batch_invariance.py",
    "tests/model/test_batch_invariance.py",
    "tests/model/test_invariant.py",
    "tests/model/test_truth.py",
    "tests/model/test_guard.py",
    "tests/model/test_runner.py",
    "tests/model/test_sampler.py",
    "tests/model/test_sampling_options.py",
)
"""Tests that compute with tensors; others of attention and models concern files, memory and settings."""


@dataclass(frozen=True)
class Setting:
    """Environment of a run."""

    name: str
    variables: dict[str, str]
    num_threads: int = 1
    needs: str | None = None
    """A flag of /proc/cpuinfo without which the setting has no effect."""


_LEAST = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
SETTINGS = (
    Setting("as-it-is", {}),
    Setting("as-it-is-2", {}, num_threads=2),
    Setting("aten-avx2", {"ATEN_CPU_CAPABILITY": "avx2"}, needs="avx512f"),
    Setting("aten-default", {"ATEN_CPU_CAPABILITY": "default"}),
    Setting("onednn-no-amx", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, needs="amx_tile"),
    Setting("onednn-no-bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, needs="avx512_bf16"),
    Setting("onednn-avx512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, needs="avx512f"),
    Setting("onednn-avx2", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, needs="avx512f"),
    Setting("onednn-sse41", {"ONEDNN_MAX_CPU_ISA": "SSE41"}),
    Setting("mkl-compatible", {"MKL_CBWR": "COMPATIBLE"}),
    Setting("mkl-cbwr-avx2", {"MKL_CBWR": "AVX2"}),
    Setting("mkl-avx2", {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, needs="avx512f"),
    Setting("mkl-sse42", {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}),
    Setting("avx2-2", _AVX2, num_threads=2, needs="avx512f"),
    Setting("least", _LEAST),
    Setting("least-2", _LEAST, num_threads=2),
)


@dataclass(frozen=True)
class Result:
    """The result of one setting."""

    passed: int = 0
    failed: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    choices: str = ""
    seconds: float = 0.0
    trouble: str = ""
    """Why there is no result."""


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.cpus", description=__doc__)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=" ".join(each.name for each in SETTINGS))
    arguments = parser.parse_args()
    known = {setting.name: setting for setting in SETTINGS}
    unknown = sorted(set(arguments.settings) - set(known))
    if unknown:
        print(f"no such setting: {', '.join(unknown)}; there are {' '.join(known)}", file=sys.stderr)
        return 2
    return run_all([known[name] for name in arguments.settings or known])


def run_all(settings: Sequence[Setting]) -> int:
    """Print the table, then each test that failed or was skipped. Returns the exit status."""
    name, flags = _cpu()
    print(f"{name}; {os.cpu_count()} cores; {time.strftime('%Y-%m-%d')}\n")
    print("| setting | variables | threads | passed | failed | skipped | partition by size of V's heads | seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    details: list[str] = []
    is_bad = False
    for setting in settings:
        variables = " ".join(f"`{key}={value}`" for key, value in setting.variables.items()) or "none"
        start = f"| {setting.name} | {variables} | {setting.num_threads} |"
        if setting.needs is not None and setting.needs not in flags:
            print(f"{start} not on this CPU: it has no {setting.needs} | | | | |", flush=True)
            continue
        result = _run(setting)
        is_bad = is_bad or bool(result.failed or result.trouble)
        counts = f"{result.passed} | {len(result.failed)} | {len(result.skipped)}"
        print(f"{start} {counts} | {result.trouble or result.choices} | {result.seconds:.0f} |", flush=True)
        details += [f"{setting.name}: failed: {test}" for test in result.failed]
        details += [f"{setting.name}: skipped: {test}" for test in result.skipped]
    print("\n" + "\n".join(details) if details else "")
    return int(is_bad)


def _run(setting: Setting) -> Result:
    threads = str(setting.num_threads)
    environment = {**os.environ, **setting.variables, "OMP_NUM_THREADS": threads, "KVPOOL_TEST_THREADS": threads}
    environment["PYTHONPATH"] = os.pathsep.join((".", "common"))
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
            command += [f"--junitxml={report}", *TESTS]
            ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
            if not report.is_file():
                return Result(trouble=f"pytest ended with status {ended.returncode}: {ended.stderr[-300:]!r}")
            result = read(report, TESTS)
    except subprocess.TimeoutExpired as error:
        return Result(trouble=f"took longer than {error.timeout:.0f} s")
    return replace(result, seconds=time.monotonic() - started)


def read(report: Path, files: Sequence[str]) -> Result:
    """Tests passed, failed and skipped with the reason, and attention's selections as recorded by tests.

    `trouble` if a file has no test in the report.
    """
    passed = 0
    failed: list[str] = []
    skipped: list[str] = []
    choices: list[str] = []
    missing = {path.removesuffix(".py").replace("/", ".") for path in files}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        missing.discard(case.get("classname", ""))
        reason = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif reason is not None:
            skipped.append(f"{name}: {reason.get('message')}")
        else:
            passed += 1
        choices += [chosen.get("value", "") for chosen in case.iter("property") if chosen.get("name") == CHOICE]
    trouble = f"no test ran of {', '.join(sorted(missing))}" if missing else ""
    return Result(passed, tuple(failed), tuple(skipped), ", ".join(choices), trouble=trouble)


def _cpu() -> tuple[str, frozenset[str]]:
    """Name of the CPU with family and model, and its flags."""
    try:
        lines = (line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    facts = {key.strip(): value.strip() for key, value in (line for line in lines if len(line) == 2)}
    name = (
        f"{facts.get('model name', platform.machine())}, family {facts.get('cpu family')}, model {facts.get('model')}"
    )
    return name, frozenset(facts.get("flags", "").split())


if __name__ == "__main__":
    sys.exit(main())
