"""The CPUs and the memory that a process may use, by files like the kernel's; and how its threads wait."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.worker_service.model.control_groups import cpu_quota, read_cpu_memory
from kvpool.worker_service.model.errors import ModelError

MIB = 1 << 20


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def quota(tmp_path: Path) -> int | None:
    return cpu_quota(tmp_path / "proc", tmp_path / "cgroup")


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert quota(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", None), ("200000 100000", 2), ("250000 100000", 3), ("50000 100000", 1), ("1 0", None), ("", None)],
)
def test_a_quota_is_rounded_up_to_whole_cpus(text: str, expected: int | None, tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "cgroup/cpu.max", f"{text}\n")
    assert quota(tmp_path) == expected


def test_the_tightest_of_nested_quotas_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/system.slice/kvpool.service\n")
    write(tmp_path / "cgroup/system.slice/cpu.max", "300000 100000\n")
    write(tmp_path / "cgroup/system.slice/kvpool.service/cpu.max", "max 100000\n")
    assert quota(tmp_path) == 3


@pytest.mark.parametrize(("quota_us", "expected"), [(-1, None), (150_000, 2)])
def test_the_first_version_has_files_of_its_own(quota_us: int, expected: int | None, tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "3:cpu,cpuacct:/docker/x\n2:memory:/docker/x\n")
    write(tmp_path / "cgroup/cpu/cpu.cfs_quota_us", f"{quota_us}\n")
    write(tmp_path / "cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert quota(tmp_path) == expected


# -- memory


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", "MemTotal:  8192000 kB\nMemFree:  100 kB\nMemAvailable:  4096000 kB\n")
    return tmp_path / "proc"


def test_a_machine_without_limits_gives_what_is_available(proc: Path, tmp_path: Path) -> None:
    assert read_cpu_memory(proc, tmp_path / "cgroup") == (8_192_000 * 1024, 4_096_000 * 1024)


def test_a_container_sees_its_limit_at_the_root(proc: Path, tmp_path: Path) -> None:
    """What it uses counts, but not the files that the kernel lets go of at once."""
    write(proc / "self/cgroup", "0::/\n")
    write(tmp_path / "cgroup/memory.max", f"{1000 * MIB}\n")
    write(tmp_path / "cgroup/memory.current", f"{300 * MIB}\n")
    write(tmp_path / "cgroup/memory.stat", f"anon 5\nactive_file 7\ninactive_file {100 * MIB}\n")
    assert read_cpu_memory(proc, tmp_path / "cgroup") == (1000 * MIB, 800 * MIB)


def test_the_tightest_of_nested_limits_counts(proc: Path, tmp_path: Path) -> None:
    write(proc / "self/cgroup", "0::/system.slice/kvpool.service\n")
    for folder, limit, used in (("system.slice", 2000, 1500), ("system.slice/kvpool.service", 1000, 200)):
        write(tmp_path / "cgroup" / folder / "memory.max", f"{limit * MIB}\n")
        write(tmp_path / "cgroup" / folder / "memory.current", f"{used * MIB}\n")
    assert read_cpu_memory(proc, tmp_path / "cgroup") == (1000 * MIB, 500 * MIB)


def test_no_limit_is_no_limit(proc: Path, tmp_path: Path) -> None:
    write(proc / "self/cgroup", "0::/a\n")
    write(tmp_path / "cgroup/a/memory.max", "max\n")
    write(tmp_path / "cgroup/a/memory.current", f"{300 * MIB}\n")
    assert read_cpu_memory(proc, tmp_path / "cgroup").total == 8_192_000 * 1024


def test_control_groups_of_the_first_version(proc: Path, tmp_path: Path) -> None:
    """The limit is looked for in the controller's own folder; one that is larger than the machine changes nothing."""
    write(proc / "self/cgroup", "5:cpu:/x\n4:memory:/docker/abc\n0::/\n")
    root = tmp_path / "cgroup/memory"
    write(root / "memory.limit_in_bytes", f"{1 << 62}\n")
    write(root / "memory.usage_in_bytes", f"{7000 * MIB}\n")
    write(root / "docker/abc/memory.limit_in_bytes", f"{500 * MIB}\n")
    write(root / "docker/abc/memory.usage_in_bytes", f"{600 * MIB}\n")
    assert read_cpu_memory(proc, tmp_path / "cgroup") == (500 * MIB, 0)


def test_a_machine_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="The memory of this machine is unknown"):
        read_cpu_memory(tmp_path, tmp_path)


def test_this_machine_says_something() -> None:
    memory = read_cpu_memory()
    assert 0 < memory.available <= memory.total


# -- threads


PROGRAM = """
import os, sys
import kvpool.worker_service.model
print(os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules)
"""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python in an environment of which OpenMP has no settings but these."""
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | variables
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)


def test_threads_wait_passively_unless_told_otherwise() -> None:
    """Set before torch is imported: OpenMP reads it when its library is loaded."""
    assert run("-c", PROGRAM).stdout == "PASSIVE False\n"
    assert run("-c", PROGRAM, OMP_WAIT_POLICY="ACTIVE").stdout == "ACTIVE False\n"


@pytest.mark.skipif(sys.platform != "linux", reason="torch has GNU's OpenMP on Linux only")
def test_the_threads_of_torch_do_not_spin(tmp_path: Path) -> None:
    """OpenMP prints its settings when it is loaded. The process ends at the device, after torch's import."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    flags = ["--dry-run", "--model", str(tmp_path), "--device", "cuda:99"]
    printed = run("-m", "kvpool.worker_service", *flags, OMP_DISPLAY_ENV="VERBOSE").stderr
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", printed)) == {"0"}
