"""What the containers are: started in order, confined, small, and reachable from this machine only."""

from __future__ import annotations

import json
import re
import time

import pytest

from kvpool.worker_service.native.cpu import cpu_info
from tests.compose.containers import MANAGER, SERVICES, WORKERS, Containers, address
from tests.compose.project import NAME, TAG
from tests.scrape import Scrape

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(1200),
]

MAX_MANAGER_IMAGE_BYTES = 250_000_000
WRITABLE = {MANAGER: "/var/lib/kvpool", "worker-0": "/var/cache/kvpool", "worker-1": "/var/cache/kvpool"}
COMPILERS = ("zig", "cc", "gcc", "g++", "c++", "clang", "ld", "make", "nvcc", "rustc", "tcc")


async def test_workers_start_when_the_manager_is_healthy(containers: Containers) -> None:
    """By the engine's own record of what happened when."""
    filters = ["--filter", f"label=com.docker.compose.project={NAME}", "--filter", "type=container"]
    lines = await containers.docker(
        "events", "--since", "30m", "--until", f"{time.time():.3f}", *filters, "--format", "{{json .}}"
    )
    # An engine that was stopped in an earlier run begins by starting that run's containers again.
    ours = {(await containers.inspect(service))["Id"] for service in (MANAGER, *WORKERS)}
    events = [event for event in map(json.loads, lines.splitlines()) if event["Actor"]["ID"] in ours]

    def first(service: str, action: str) -> int:
        return min(
            int(event["timeNano"])
            for event in events
            if event["Action"] == action and event["Actor"]["Attributes"]["com.docker.compose.service"] == service
        )

    for worker in WORKERS:
        assert first(MANAGER, "start") < first(MANAGER, "health_status: healthy") < first(worker, "start")


async def test_the_managers_image_is_small(containers: Containers) -> None:
    size = int(await containers.docker("image", "inspect", f"kvpool-manager:{TAG}", "--format", "{{.Size}}"))
    print(f"kvpool-manager: {size / 1e6:.1f} MB")
    assert size < MAX_MANAGER_IMAGE_BYTES


async def test_the_managers_image_has_no_torch(containers: Containers) -> None:
    """The worker's has, or the question would prove nothing."""
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    assert (await containers.inside(MANAGER, "python", "-c", program)).status == 0
    assert (await containers.inside("worker-0", "python", "-c", program)).status == 1
    # Nor anywhere outside of Python's path. Our own worker's code, which would use it, comes with the package.
    for name in ("torch", "torch-*", "libtorch*", "libc10*"):
        assert "torch" not in (await containers.inside(MANAGER, "find", "/", "-xdev", "-iname", name)).output
    assert "libtorch" in (await containers.inside("worker-0", "find", "/opt", "-iname", "libtorch*")).output


@pytest.mark.parametrize("service", SERVICES)
async def test_no_image_has_a_compiler(service: str, containers: Containers) -> None:
    """By name on the path, and by what a compiler brings along, wherever it is."""
    for compiler in COMPILERS:
        assert (await containers.inside(service, "sh", "-c", f"command -v {compiler}")).status != 0, compiler
    found = await containers.inside(
        service, "find", "/usr", "/opt", "-name", "cc1*", "-o", "-name", "crtbegin.o", "-o", "-name", "ziglang*"
    )
    assert found == (0, "")


@pytest.mark.parametrize("worker", WORKERS)
async def test_a_worker_runs_the_step_that_its_image_carries(worker: str, containers: Containers) -> None:
    """It cannot compile one. What it computes is compared with transformers in test_compose_service.py."""
    if not cpu_info.flags() & {"avx2", "asimd"}:
        pytest.skip("the image carries steps for x86-64 with AVX2 and for aarch64; this CPU is another")
    (runtime,) = set(re.findall(r"runtime: (.*?)[;)]", await containers.log(worker)))
    assert re.fullmatch(r"native \([\w-]+, float32, built for [\w+-]+, 1 threads", runtime), runtime


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_is_an_ordinary_user_without_privileges(service: str, containers: Containers) -> None:
    assert (await containers.inside(service, "id", "-u")).output.strip() == "10001"
    status = (await containers.inside(service, "cat", "/proc/1/status")).output
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["10001"] * 4
    assert {name: int(fields[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")} == {
        "CapEff": 0,
        "CapPrm": 0,
        "CapBnd": 0,
    }
    assert fields["NoNewPrivs"] == "1"


@pytest.mark.parametrize("service", SERVICES)
async def test_only_the_volumes_can_be_written(service: str, containers: Containers) -> None:
    for folder in ("/", "/etc", "/opt/venv", "/usr/local", "/var/lib", "/var/cache"):
        refused = await containers.inside(service, "touch", f"{folder}/probe")
        assert refused.status != 0, folder
        # Also root could not: it is not only a question of whose the folders are.
        by_root = await containers.try_(
            "docker", "exec", "--user", "0", f"{NAME}-{service}-1", "touch", f"{folder}/probe"
        )
        assert "Read-only file system" in by_root.output, folder
    for folder in (WRITABLE[service], "/tmp"):
        assert await containers.inside(service, "sh", "-c", f"touch {folder}/probe && rm {folder}/probe") == (0, "")


@pytest.mark.parametrize("service", SERVICES)
async def test_ports_are_open_on_loopback_only(service: str, containers: Containers) -> None:
    ports = (await containers.inspect(service))["NetworkSettings"]["Ports"]
    bindings = [
        f"{binding['HostIp']}:{binding['HostPort']}" for published in ports.values() for binding in published or ()
    ]
    assert bindings == [address(service)]


async def test_metrics_are_told_inside_the_network(containers: Containers) -> None:
    """To whoever asks from another container, as a Prometheus there would."""
    for service in SERVICES:
        url = f"http://{service}:9500/metrics"
        code = f"import urllib.request as r; print(r.urlopen({url!r}, timeout=30).read().decode())"
        ended = await containers.inside("worker-0", "python", "-c", code)
        assert ended.status == 0, ended.output
        name = "kvpool_manager_epoch" if service == MANAGER else "kvpool_worker_session_open"
        assert Scrape(ended.output).value(name) >= 1
