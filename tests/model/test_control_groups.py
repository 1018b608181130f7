"""The CPUs that a container or service may use, by files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.worker_service.model.control_groups import cpu_quota


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
