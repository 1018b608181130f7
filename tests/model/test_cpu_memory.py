"""How much memory a process on a CPU can have, by files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.worker_service.model.control_groups import read_cpu_memory
from kvpool.worker_service.model.errors import ModelError

MIB = 1 << 20


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


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
