"""Which processes `kvpool up` starts, with which arguments and variables, what it refuses, and what it does when one ends."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
from rich.console import Console

from kvpool.cache_service.settings import ManagerSettings
from kvpool.cli import settings as cli_settings
from kvpool.cli.commands.up import FLAGS, UpSettings, run_cluster
from kvpool.cli.launch.children import Children
from kvpool.cli.launch.cluster import Cluster, ClusterSpec, free_port, num_cores, require_free_port
from kvpool.cli.launch.gpus import one_gpu_each, visible_gpus
from kvpool.cli.launch.log import Level
from kvpool.cli.launch.trial import try_settings
from kvpool.client.errors import InvalidRequest, Unavailable
from kvpool.gateway.settings import GatewaySettings
from kvpool.process.services import WORKER_MODULE, service_command
from kvpool.process.settings import ProcessSettings, SettingsProblem, load_settings
from kvpool.worker_service.settings import WorkerSettings
from tests.cli.test_cli_children import child
from tests.client.commands import became, exit_status, run_kvpool
from tests.client.fakes import FakeWorker, fake_cluster
from tests.client.processes import is_alive
from tests.cluster.forked_children import forked_children

KINDS: Final[Mapping[str, type[ProcessSettings]]] = {"manager": ManagerSettings, "gateway": GatewaySettings}


def spec(*arguments: str) -> ClusterSpec:
    own, of_workers = FLAGS.split(["--device", "cpu", *arguments])
    return load_settings(UpSettings, own).spec(of_workers)


def planned(started: ClusterSpec) -> dict[str, ProcessSettings]:
    """The settings of each process, in the order of their starts, as it understands its arguments itself."""
    return {
        child.name: load_settings(
            KINDS.get(child.name, WorkerSettings), list(child.command[child.command.index("-m") + 2 :])
        )
        for child in started.children({})
    }


def free_ports(count: int) -> int:
    """The first of that many consecutive ports that are free at this moment."""
    while True:
        first = free_port()
        try:
            for port in range(first, min(first + count, 65536)):
                require_free_port("127.0.0.1", port)
        except Unavailable:
            continue
        if first + count <= 65536:
            return first


# -- workers


@pytest.mark.parametrize("dashes", [(), ("--",)])
def test_each_worker_gets_the_flags_that_are_not_up_s_own(dashes: tuple[str, ...]) -> None:
    """Before and after `--`. A value that is called like a setting of up is a value."""
    of_workers = ["--scheduling-policy", "priority", "--gpu-memory-utilization=0.5", "--cache-dir", "workers",
                  "--no-prefix-caching", "--num-blocks", "33"]  # fmt: skip
    started = spec(*dashes, *of_workers, "--workers", "2", "--host=127.0.0.2")
    assert not set(of_workers) & set(started.children({})[0].command)
    processes = planned(started)
    assert list(processes) == ["manager", "worker-0", "worker-1"]
    for name in ("worker-0", "worker-1"):
        settings = processes[name]
        assert isinstance(settings, WorkerSettings)
        assert (settings.scheduling_policy, settings.gpu_memory_utilization) == ("priority", 0.5)
        assert (settings.cache_dir, settings.prefix_caching) == (Path("workers"), False)
        assert (settings.worker_id, settings.num_blocks, settings.device) == (name, 33, "cpu")
        assert (settings.host, settings.manager) == ("127.0.0.2", f"127.0.0.2:{started.port}")


def test_a_single_worker_may_be_given_its_port() -> None:
    (worker,) = planned(spec("--join", "10.0.0.1:50051", "--", "--port", "7001")).values()
    assert isinstance(worker, WorkerSettings)
    assert (worker.port, worker.manager) == (7001, "10.0.0.1:50051")


def test_cores_are_divided_among_workers_unless_the_user_did() -> None:
    spec = ClusterSpec(num_workers=2)
    manager, *workers = spec.children({})
    assert "OMP_NUM_THREADS" not in manager.environment
    assert {child.environment["OMP_NUM_THREADS"] for child in workers} == {str(max(1, num_cores() // 2))}
    assert all("OMP_NUM_THREADS" not in child.environment for child in spec.children({"OMP_NUM_THREADS": "7"}))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-num-waiting", "9", "--manager"], "give --join"),
        (["--worker-id=w"], "give --name"),
        (["--dry-run"], "`kvpool worker --dry-run`"),
        (["--workers", "3", "--metrics-port", "65533"], "4 processes need as many ports"),
        (["--port", "9502", "--workers", "2", "--metrics-port", "9500"], "among them the manager's own, 9502"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_way_to_say_it(arguments: list[str], said: str) -> None:
    with pytest.raises(SettingsProblem, match=said):
        spec(*arguments)


# -- the gateway and the metrics


def test_the_gateway_comes_last_and_knows_its_manager() -> None:
    started = spec("--port", "50099", "--http", "8099", "--log-format", "json")
    *_, (name, gateway) = planned(started).items()
    assert isinstance(gateway, GatewaySettings)
    assert (name, gateway.host, gateway.port, gateway.manager) == ("gateway", "127.0.0.1", 8099, "127.0.0.1:50099")
    assert (gateway.log_format, started.http_url) == ("json", "http://127.0.0.1:8099")
    *_, gateway = planned(spec("--join", "10.0.0.1:50051", "--name", "b", "--http", "8099")).values()
    assert isinstance(gateway, GatewaySettings)
    assert gateway.manager == "10.0.0.1:50051"
    assert spec().http_url == ""


def test_what_the_gateway_lacks_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(cli_settings, "find_spec", lambda name: None if name == "starlette" else real(name))
    with pytest.raises(SettingsProblem, match=r"starlette is not installed.*kvpool\[gateway\]"):
        spec("--http", "8099")


@pytest.mark.parametrize(
    ("arguments", "ports", "urls"),
    [
        ([], {"manager": None, "worker-0": None}, {}),
        (
            ["--workers", "2", "--host", "10.0.0.1", "--metrics-port", "9500"],
            {"manager": 9500, "worker-0": 9501, "worker-1": 9502},
            {"manager": "127.0.0.1:9500", "worker-0": "127.0.0.1:9501", "worker-1": "127.0.0.1:9502"},
        ),
        (
            ["--join", "10.0.0.1:1", "--name", "b", "--metrics-port", "9500", "--metrics-host", "10.0.0.2"],
            {"b-0": 9500},
            {"b-0": "10.0.0.2:9500"},
        ),
    ],
)
def test_each_process_has_a_port_for_its_metrics_if_one_is_given(
    arguments: list[str], ports: dict[str, int | None], urls: dict[str, str]
) -> None:
    started = spec(*arguments)
    assert {name: getattr(settings, "metrics_port", 0) for name, settings in planned(started).items()} == ports
    assert started.metrics_urls == {name: f"http://{url}/metrics" for name, url in urls.items()}


@pytest.mark.parametrize("flag", ["--port", "--http", "--metrics-port"])
def test_a_port_that_is_taken_is_named_with_its_flag_before_anything_starts(flag: str) -> None:
    """Another cluster's manager would be taken for ours."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started = spec("--port", str(free_ports(1)), flag, str(port))
        with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:{port}.*choose another port with {flag}"):
            started.require_free_ports()


# -- GPUs: each worker has one of its own, and no other process sees it


@pytest.mark.parametrize(
    ("files", "variable", "gpus"),
    [
        (["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"], None, ["0", "1"]),
        (["nvidia2"], None, ["0"]),  # in a container, which was given the host's third GPU
        (["nvidiactl", "null"], None, None),
        (["nvidia0"], "2, 3", ["2", "3"]),
        (["nvidia0"], "MIG-a,MIG-b", ["MIG-a", "MIG-b"]),
        (["nvidia0"], "", []),
    ],
)
def test_the_variable_goes_before_the_device_files(
    files: list[str], variable: str | None, gpus: list[str] | None, tmp_path: Path
) -> None:
    """None: without a device file the GPUs are not known, and each worker finds out."""
    for name in files:
        (tmp_path / name).touch()
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpus(environment, tmp_path) == gpus
    if gpus is None:
        assert one_gpu_each(2, environment, tmp_path) == ["0", "1"]
        return
    with pytest.raises(
        InvalidRequest, match=rf"8 workers .* need 8 GPUs, there are {len(gpus)}.*: .* cuda:0"
    ) as refused:
        one_gpu_each(8, environment, tmp_path)
    assert (f"(CUDA_VISIBLE_DEVICES={variable})" in str(refused.value)) == (variable is not None)


def test_workers_are_started_with_one_gpu_each() -> None:
    spec = ClusterSpec(num_workers=8, gpu_each=True, share_cores=False)
    manager, *workers = spec.children({"CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2,1,0"})
    assert "CUDA_VISIBLE_DEVICES" not in manager.environment
    assert [worker.environment["CUDA_VISIBLE_DEVICES"] for worker in workers] == list("76543210")
    assert not any("OMP_NUM_THREADS" in worker.environment for worker in workers)


@pytest.mark.parametrize(
    ("flags", "variables", "file", "of_workers"),
    [
        ({"device": "cuda"}, {}, "", ("--device", "cuda:0")),
        ({}, {}, "", ("--device", "cuda:0")),
        ({"device": "cuda:1"}, {}, "", ("--device", "cuda:1")),
        ({}, {"KVPOOL_WORKER_DEVICE": "cpu"}, "", ()),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, "", None),
        ({}, {}, '[worker]\ndevice = "cpu"\n', ()),
        ({}, {}, "[worker]\nnum_blocks = 9\n", ("--device", "cuda:0")),
    ],
)
def test_each_worker_needs_its_own_if_it_is_asked_for_or_nothing_is_said_on_a_machine_with_gpus(
    flags: dict[str, str],
    variables: dict[str, str],
    file: str,
    of_workers: tuple[str, ...] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that the workers get by a variable or a file is left alone. None: any arguments."""
    for name in ("KVPOOL_CONFIG", "KVPOOL_WORKER_DEVICE", "KVPOOL_UP_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "kvpool.toml"
    config.write_text(file)
    for name, value in ({"CUDA_VISIBLE_DEVICES": "0,1", "KVPOOL_CONFIG": str(config)} | variables).items():
        monkeypatch.setenv(name, value)
    started = UpSettings(**flags).spec()  # type: ignore[arg-type]
    assert started.gpu_each == (of_workers == ("--device", "cuda:0"))
    if of_workers is not None:
        assert started.worker_arguments == of_workers


# -- how it ends when its workers cannot use their settings, and what it does when one of them ends


class Errors:
    """A log of `kvpool up` that keeps its own errors."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, name: str, line: str) -> None:
        """A line of a process."""

    def say(self, line: str, level: Level = Level.info, fields: Mapping[str, object] | None = None) -> None:
        if level is Level.error:
            self.lines.append(line)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (
            ["--wokrers", "2", "--lease-seconds", "3", "--", "--schedulling-policy", "fair"],
            2,
            [
                "kvpool up: there is no flag --wokrers; did you mean --workers?",
                "kvpool up: --lease-seconds is a flag of the manager: set KVPOOL_MANAGER_LEASE_SECONDS, or",
                "kvpool up: there is no flag --schedulling-policy; did you mean --scheduling-policy?",
            ],
        ),
        (["--block-size", "17", "--workers", "3"], 2, ["kvpool worker: --block-size must be a power of two, got 17"]),
        (["--model", "/no/such"], 1, ["kvpool worker: There is no model folder '/no/such'"]),
        (
            ["--model", "MODEL", "--max-model-len", "513"],  # config.json is enough; the weights need not be there
            1,
            ["kvpool worker: --max-model-len 513 is not within 2 … 512, the limits of the model's config."],
        ),
    ],
)
async def test_what_a_worker_cannot_use_ends_it_before_a_worker_is_started(
    arguments: list[str], status: int, says: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
    given = [word.replace("MODEL", str(tmp_path)) for word in arguments]
    errors = Errors()
    started = spec("--port", str(free_port()), "--state-dir", str(tmp_path / "state"), *given)
    with forked_children():
        assert await run_cluster(started, errors, Console(quiet=True)) == status
    assert not (tmp_path / "state" / "workers").exists(), "each worker makes its folder there"
    assert len(errors.lines) == len(says)
    assert all(line.startswith(start) for line, start in zip(errors.lines, says, strict=True)), errors.lines


async def test_without_a_manager_of_its_own_it_refuses_the_same() -> None:
    done = await run_kvpool("up", "--join", f"127.0.0.1:{free_port()}", "--model", "/no/such")
    assert done.stderr.startswith("kvpool worker: There is no model folder '/no/such'")
    assert done.returncode == 1


async def test_a_dry_run_without_an_answer_is_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    await try_settings(child("worker-0", script), longest_seconds=0.2)
    assert not pid_file.exists() or not is_alive(int(pid_file.read_text()))


async def test_a_worker_that_ends_while_the_others_start_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fails, lives = "sys.exit('--dry-run' not in sys.argv)", "time.sleep(0 if '--dry-run' in sys.argv else 600)"
    children = [
        child(name, f"import sys, time; print('fine', flush=True); {rest}")
        for name, rest in (("worker-0", lives), ("worker-1", fails))
    ]
    monkeypatch.setattr(ClusterSpec, "children", lambda self: children)
    worker, events = FakeWorker("worker-0"), asyncio.Queue[str]()
    async with fake_cluster(worker) as manager, Children(lambda name, line: None) as started:
        manager.workers = []

        async def serve_when_the_other_has_ended() -> None:
            told.append(await events.get())
            manager.workers = [worker]

        told: list[str] = []
        waiting = asyncio.create_task(serve_when_the_other_has_ended())
        cluster = Cluster(ClusterSpec(num_workers=2, join=manager.address), started)
        workers = await cluster.start(lambda line: None, events.put_nowait)
        await waiting
    assert [worker.worker_id for worker in workers] == ["worker-0"]
    assert told == ["worker-1 ended with exit status 1; its log above says why. The cluster continues without it"]


def test_help_after_the_dashes_is_the_worker_s() -> None:
    assert became(lambda: exit_status(["up", "--", "--help"])) == service_command(WORKER_MODULE, ["--help"])
