"""docker-compose.yml and the Dockerfile without an engine, and the project of `make test SUITE=compose`."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from kvpool.cache_service.settings import ManagerSettings
from kvpool.gateway.settings import GatewaySettings
from kvpool.worker_service.settings import WorkerSettings
from tests.compose.project import COMPOSE_FILE, PORTS, ROOT, compose_environment

# Every variable at its default; a variable without one stays as it is and fails the first test.
COMPOSE = re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", COMPOSE_FILE.read_text())
FILE: dict[str, Any] = yaml.safe_load(COMPOSE)
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
OBSERVERS = [name for name in SERVICES if "observe" in SERVICES[name].get("profiles", [])]
"""Other projects' images, which read metrics."""
OURS = [name for name in SERVICES if name not in OBSERVERS]
SERVERS = [name for name in OURS if name != "client"]
WORKERS = [name for name in SERVERS if name not in ("manager", "gateway")]
GPU_WORKERS = [name for name in WORKERS if "deploy" in SERVICES[name]]
BUILT = {service["image"]: service["build"]["target"] for service in SERVICES.values() if "build" in service}

# As Docker reads it: without comments, each instruction on one line.
DOCKERFILE = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "Dockerfile").read_text()))
COMPILER = "gcc libc6-dev"


def stage(target: str) -> str:
    """The instructions of a stage of the Dockerfile, after those of the stages that it is built on."""
    match = re.search(rf"^FROM (\S+) AS {target}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert match is not None, f"the Dockerfile has no stage {target}"
    return match[2] if match[1].startswith("$") else stage(match[1]) + match[2]


def instructions(target: str, *words: str) -> list[str]:
    """What follows each of these words in a stage."""
    return re.findall(rf"^(?:{'|'.join(words)}) (.*)", stage(target), re.MULTILINE)


def seconds(duration: str) -> int:
    match = re.fullmatch(r"(\d+)s", duration)
    assert match is not None, f"{duration!r}: write a duration as 20s"
    return int(match[1])


def test_every_variable_has_a_default() -> None:
    assert not re.findall(r"\$.*", COMPOSE)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"]), "user and group as numbers, not root"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert {"privileged", "cap_add", "devices", "pid", "ipc"}.isdisjoint(service)
    assert service["init"] is True, "without it no process passes signals on and collects orphans"
    assert isinstance(service["pids_limit"], int)


@pytest.mark.parametrize("name", OURS)
def test_images_are_tagged_built_once_and_never_pulled(name: str) -> None:
    """`latest` is what was built or pulled last, and a registry may hold another image of the same name."""
    service = SERVICES[name]
    assert re.fullmatch(r"[a-z-]+:(?!latest$)\w+", service["image"])
    assert service["image"] in BUILT
    assert sum(service["image"] == other["image"] and "build" in other for other in SERVICES.values()) == 1
    assert "build" in service or service["pull_policy"] == "never"


@pytest.mark.parametrize("name", OURS)
def test_only_declared_volumes_are_mounted(name: str) -> None:
    assert {volume.partition(":")[0] for volume in SERVICES[name].get("volumes", [])} <= set(FILE["volumes"])


@pytest.mark.parametrize("name", ["manager", *WORKERS])
def test_a_server_has_one_port_on_loopback_and_a_health_check_for_it(name: str) -> None:
    service, environment = SERVICES[name], SERVICES[name]["environment"]
    inside = environment["KVPOOL_MANAGER_PORT" if name == "manager" else "KVPOOL_WORKER_PORT"]
    (port,) = service["ports"]
    outside = port.removesuffix(f":{inside}")
    assert re.fullmatch(r"127\.0\.0\.1:\d+", outside), port
    assert name == "manager" or environment["KVPOOL_WORKER_ADVERTISE"] == outside
    assert "network_mode" not in service
    assert service["healthcheck"]["test"][:3] == ["CMD", "kvpool-health", f"127.0.0.1:{inside}"]
    assert re.fullmatch(r"\d+g", service["mem_limit"])


def test_the_gateway_is_on_the_machines_loopback_unless_a_key_is_given() -> None:
    """It has the machine's network, because the workers' addresses are the machine's; other addresses need a key."""
    service, environment = SERVICES["gateway"], SERVICES["gateway"]["environment"]
    assert (service["network_mode"], "ports" in service) == ("host", False)
    assert environment["KVPOOL_GATEWAY_HOST"] == "127.0.0.1"
    assert "KVPOOL_GATEWAY_NO_API_KEY" not in environment
    assert environment["KVPOOL_GATEWAY_MANAGER"] == SERVICES["client"]["environment"]["KVPOOL_MANAGER"]
    assert service["healthcheck"]["test"][-1].endswith(f":{environment['KVPOOL_GATEWAY_PORT']}/version")
    assert re.fullmatch(r"\d+g", service["mem_limit"])


def test_the_gateways_image_has_no_torch() -> None:
    assert "worker" not in stage("gateway")
    assert "kvpool.gateway.server" in stage("gateway"), "the build fails if a package is missing"


def test_prometheus_and_grafana_are_there_and_start_only_if_asked_for() -> None:
    assert OBSERVERS == ["prometheus", "grafana"]
    assert all(SERVICES[name]["profiles"] == ["observe"] for name in OBSERVERS)


@pytest.mark.parametrize("name", OBSERVERS)
def test_an_observer_has_a_pinned_image_one_port_on_loopback_and_a_health_check(name: str) -> None:
    """No variable may publish the port elsewhere: there is no login."""
    service = SERVICES[name]
    assert re.fullmatch(rf"[a-z]+/{name}:v?\d+\.\d+\.\d+", service["image"]), "a whole version, which stays what it is"
    (port,) = service["ports"]
    assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port), port
    assert f'"127.0.0.1:${{KVPOOL_PORT_{name.upper()}:-' in COMPOSE_FILE.read_text()
    inside = port.rpartition(":")[2]
    assert service["healthcheck"]["test"][-1].startswith(f"http://127.0.0.1:{inside}/")
    assert re.fullmatch(r"\d+g", service["mem_limit"])


@pytest.mark.parametrize("name", OBSERVERS)
def test_an_observer_writes_only_into_its_own_volume(name: str) -> None:
    for volume in SERVICES[name]["volumes"]:
        source, target, *mode = volume.split(":")
        if source.startswith("./"):
            assert (ROOT / source).exists(), source
            assert mode == ["ro"], volume
        else:
            assert source in FILE["volumes"], volume
            assert target in ("/prometheus", "/var/lib/grafana")


def test_grafana_has_no_account_and_asks_no_other_machine() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    asking = [name for name in environment if "CHECK_FOR" in name or "REPORTING" in name or "FEED" in name]
    assert len(asking) == 4
    assert all(environment[name] == "false" for name in asking)
    home = environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert any(volume.split(":")[1] == home for volume in SERVICES["grafana"]["volumes"])


@pytest.mark.parametrize("name", SERVERS)
def test_the_environment_sets_settings_that_exist(name: str) -> None:
    """A server ignores variables that it does not know."""
    fields = {f"KVPOOL_MANAGER_{field.upper()}" for field in ManagerSettings.model_fields}
    fields |= {f"KVPOOL_GATEWAY_{field.upper()}" for field in GatewaySettings.model_fields}
    fields |= {f"KVPOOL_WORKER_{field.upper()}" for field in WorkerSettings.model_fields}
    assert {variable for variable in SERVICES[name]["environment"] if variable.startswith("KVPOOL_")} <= fields


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_waits_for_its_manager_and_ends_its_streams(name: str) -> None:
    service = SERVICES[name]
    assert service["depends_on"] == {"manager": {"condition": "service_healthy"}}
    assert service["restart"] == "on-failure", "a drained worker ends with status 0 and must stay away"
    # After its streams it frees its blocks and deregisters, which takes seconds on a busy machine.
    grace = float(service["environment"]["KVPOOL_WORKER_GRACE_SECONDS"])
    assert seconds(service["stop_grace_period"]) >= grace + 20


def test_the_manager_restarts_and_the_client_does_not() -> None:
    assert SERVICES["manager"]["restart"] == "unless-stopped"
    assert seconds(SERVICES["manager"]["stop_grace_period"]) >= 10
    assert SERVICES["client"]["restart"] == "no"
    assert "ports" not in SERVICES["client"]


def test_no_two_services_share_a_port_a_worker_id_or_a_gpu() -> None:
    for values in (
        [SERVICES[name]["ports"][0].rpartition(":")[0] for name in ["manager", *WORKERS, *OBSERVERS]],
        [SERVICES[name]["environment"]["KVPOOL_WORKER_WORKER_ID"] for name in WORKERS],
        [str(SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]) for name in GPU_WORKERS],
    ):
        assert len(set(values)) == len(values) > 1, values


@pytest.mark.parametrize("name", OURS)
def test_a_gpu_worker_has_one_gpu_and_a_compiler_and_others_neither(name: str) -> None:
    """Triton compiles at run time, and a tmpfs allows no execution: its cache must be in a volume."""
    service = SERVICES[name]
    assert (name in GPU_WORKERS) == ("gpu" in service.get("profiles", [])) == name.startswith("worker-gpu")
    assert (name in GPU_WORKERS) == (BUILT[service["image"]] == "worker-gpu")
    if name in GPU_WORKERS:
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert len(device["device_ids"]) == 1
        assert device["capabilities"] == ["gpu"]
        (cache,) = re.findall(r"TRITON_CACHE_DIR=(\S+)", stage("worker-gpu"))
        assert any(PurePosixPath(cache).is_relative_to(volume.split(":")[1]) for volume in service["volumes"])


@pytest.mark.parametrize("target", BUILT.values())
def test_an_image_runs_one_program_as_a_user(target: str) -> None:
    *_, user = instructions(target, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    starts = instructions(target, "ENTRYPOINT", "CMD")
    assert starts
    assert all(re.fullmatch(r'\["python", "-m", "[\w.]+"\]', start) for start in starts), "a shell takes no signals"


@pytest.mark.parametrize("target", BUILT.values())
def test_an_image_builds_nothing_itself(target: str) -> None:
    tools = re.compile(r"\b(?:pip|apt-get|apt|apk|make|gcc|curl|wget)\b")
    building = [command for command in instructions(target, "RUN") if tools.search(command)]
    if target == "worker-gpu":
        (install,) = building
        assert re.search(rf"apt-get install [^&]*{COMPILER}\b", install)
    else:
        assert building == []


def test_the_compiler_of_the_native_step_is_in_no_image() -> None:
    """400 MB. The worker's image gets the compiled files, by a stage between; the manager's has no use for them."""

    def sources(target: str) -> set[str]:
        return set(re.findall(r"--from=(\S+)", " ".join(instructions(target, "COPY"))))

    assert "ziglang" in stage("native-step")
    assert "native-step" in sources("kvpool-worker")
    for target in BUILT.values():
        assert "native-step" not in sources(target), target
    assert "native-step" not in sources("kvpool")
    assert "kvpool-worker" in sources("worker")


def test_the_dockerfile_takes_in_only_the_checkout_and_a_tagged_base() -> None:
    assert not re.findall(r"^ADD .*|^COPY .*\.\./.*", DOCKERFILE, re.MULTILINE)
    stages = set(re.findall(r" AS (\S+)$", DOCKERFILE, re.MULTILINE))
    bases = set(re.findall(r"^(?:ARG \w+_IMAGE=|FROM )([^\s$]+)", DOCKERFILE, re.MULTILINE)) - stages
    assert bases
    assert all(re.fullmatch(r"[a-z/.]+:(?!latest$).+", base) for base in bases), bases


def test_neither_file_names_a_folder_of_one_machine() -> None:
    here = {str(ROOT), str(Path.home()), sys.prefix} - {"/", "/root"}
    for text in (DOCKERFILE, COMPOSE):
        assert not re.findall(r"(?:file:/|/(?:home|Users|mnt|media|srv)/)\S*", text)
        assert not [folder for folder in here if folder in text]


def test_the_images_get_every_package_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {PurePosixPath(path).parts[0] for path in project["tool"]["setuptools"]["package-dir"].values()}
    first, *lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert first == "*"
    build = {"pyproject.toml", "constraints.txt", project["project"]["readme"], "LICENSE", "setup.py"}
    assert let_in == folders | build
    assert all((ROOT / path).exists() for path in let_in)


# -- the project of the tests


def test_the_project_has_its_own_ports_and_settings() -> None:
    found = compose_environment(
        {"KVPOOL_MODEL": "mine", "COMPOSE_PROFILES": "gpu", "KVPOOL_FIND_LINKS": "x", "DOCKER_HOST": "y", "PATH": "z"}
    )
    assert not {"KVPOOL_MODEL", "COMPOSE_PROFILES"} & set(found)
    assert (found["KVPOOL_FIND_LINKS"], found["DOCKER_HOST"], found["PATH"]) == ("x", "y", "z")
    for service, port in PORTS.items():
        variable = f"KVPOOL_PORT_{service.upper().replace('-', '_')}"
        assert found[variable] == str(port)
        assert f"${{{variable}:-" in COMPOSE_FILE.read_text()
        assert f"${{{variable}:-{port}}}" not in COMPOSE_FILE.read_text()
