"""docker-compose.yml and the Dockerfile keep their rules, and every rule can be broken."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path, PurePosixPath

import pytest
import yaml

from scripts.compose.project import COMPOSE_FILE, DOCKERFILE, PORTS, ROOT, compose_environment
from scripts.compose.rules import problems

COMPOSE = COMPOSE_FILE.read_text()
IMAGES = DOCKERFILE.read_text()


def test_the_repositorys_own_files_keep_every_rule() -> None:
    assert problems(COMPOSE, IMAGES) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('    user: "10001:10001"\n    restart: unless', "    restart: unless", "manager runs as None"),
        ('  user: "10001:10001"\n  depends_on', '  user: "0:0"\n  depends_on', "worker-1 runs as '0:0'"),
        ('  user: "10001:10001"\n  depends_on', "  user: kvpool\n  depends_on", "worker-gpu-1 runs as 'kvpool'"),
        ("  read_only: true\n", "", "client has a root file system that can be written"),
        ("cap_drop: [ALL]", "cap_drop: [NET_RAW]", "drops the capabilities ['NET_RAW']"),
        ('["no-new-privileges:true"]', "[]", "may gain privileges"),
        ("  read_only: true", "  read_only: true\n  privileged: true", "services.manager.privileged: Extra inputs"),
        ("  pids_limit: 1024\n", "", "worker-0 may use up the machine"),
        ("    mem_limit: ${KVPOOL_MEMORY_MANAGER:-1g}\n", "", "manager may use up the machine"),
        ("kvpool-manager:${KVPOOL_TAG:-local}", "kvpool-manager", "image 'kvpool-manager': give it a tag"),
        ("${KVPOOL_TAG:-local}", "${KVPOOL_TAG:-latest}", "worker-gpu-0 has the image 'kvpool-worker-gpu:latest'"),
        ("pull_policy: never", "pull_policy: missing", "worker-1 is not built: it needs build, or pull_policy: never"),
        ("    image: kvpool-worker:", "    image: kvpool-client:", "client runs kvpool-client:local, which no service"),
        ("  worker-1:\n    <<: *cpu-worker", "  worker-1:\n    <<: *cpu-worker\n    build: { <<: *build, target: worker }",
         "the build of kvpool-worker:local is given to 2 services"),
        ("  healthcheck: &worker-health", "  x-healthcheck: &worker-health", "x-healthcheck: Extra inputs"),
        ("test: [CMD, kvpool-health,", "test: [CMD-SHELL, kvpool-health,", "manager has the health check ['CMD-SHELL'"),
        ('kvpool-health, "127.0.0.1:50052"', 'kvpool-health, "127.0.0.1:50051"', "kvpool-health, 127.0.0.1:50052], the"),
        ("restart: unless-stopped", 'restart: "no"', "manager publishes ports, but is a command that ends"),
        ("${KVPOOL_BIND:-127.0.0.1}", "${KVPOOL_BIND:-0.0.0.0}", "manager publishes ['0.0.0.0:50051:50051']"),
        ("${KVPOOL_BIND:-127.0.0.1}:${KVPOOL_PORT_MANAGER", "${KVPOOL_PORT_MANAGER", "publishes ['50051:50051']"),
        ('KVPOOL_WORKER_PORT: "50052"', 'KVPOOL_WORKER_PORT: "50053"', "listens on 50053 but publishes 50052"),
        ("{KVPOOL_PORT_WORKER_1:-50062}:50052", "{KVPOOL_PORT_WORKER_1:-50063}:50052", "tells clients 127.0.0.1:50062"),
        ("    restart: unless-stopped", "    restart: always\n    network_mode: host", "manager has network_mode host"),
        ("  init: true\n", "", "manager has no init process"),
        ("stop_grace_period: 60s", "stop_grace_period: 39s", "gives its streams 20 s but is killed after 39 s"),
        ('  KVPOOL_WORKER_GRACE_SECONDS: "20"', '  KVPOOL_WORKER_GRACE_SECONDS: "41"', "must be at least 61s"),
        ("condition: service_healthy", "condition: service_started", "worker-0 does not wait for the manager"),
        ("restart: on-failure", "restart: always", "worker-1 has restart: always"),
        ("KVPOOL_WORKER_DTYPE:", "KVPOOL_WORKER_DATATYPE:", "sets KVPOOL_WORKER_DATATYPE, which is no setting"),
        ("KVPOOL_MANAGER_STATE_DIR:", "KVPOOL_MANAGER_STATE:", "sets KVPOOL_MANAGER_STATE, which is no setting"),
        ('["${KVPOOL_GPU_1:-1}"]', '["1", "2"]', "worker-gpu-1 is in the profile gpu: it needs one device"),
        ("${KVPOOL_GPU_1:-1}", "${KVPOOL_GPU_1:-0}", "the GPU 0 is given to 2 services"),
        ("  profiles: [gpu]\n", "", "worker-gpu-0 reserves a device"),
        ("target: worker-gpu", "target: worker", "builds worker for services with a GPU and for others"),
        ("- models:/var/cache/kvpool", "- models:/var/lib/kvpool", "worker-gpu-0 keeps compiled kernels in /var/cache/kvpool/tri"),
        ("- models:/var/cache", "- /srv/models:/var/cache", "worker-0 mounts /srv/models"),
        ("  models:\n  #", "  #", "worker-1 mounts models"),
        ("KVPOOL_PORT_WORKER_1:-50062", "KVPOOL_PORT_WORKER_1:-50061", "the port 127.0.0.1:50061 is given to 2 services"),
        ("${KVPOOL_NAME:-}worker-1", "${KVPOOL_NAME:-}worker-0", "the worker_id worker-0 is given to 2 services"),
        ("${KVPOOL_MODEL:-smollm2}", "${KVPOOL_MODEL}", "${KVPOOL_MODEL} has no default"),
        ("pids_limit: 1024", "pids_limit: lots", "pids_limit: Input should be a valid integer"),
        ("stop_grace_period: 10s", "stop_grace_period: 10", "write a duration"),
        ("target: manager", "target: boss", "has no stage boss, which docker-compose.yml builds"),
        ("services:\n", "services: [\n", "not YAML"),
    ],
)  # fmt: skip
def test_a_broken_compose_file_is_told(old: str, new: str, words: str) -> None:
    assert old in COMPOSE
    found = problems(COMPOSE.replace(old, new), IMAGES)
    assert any(words in problem for problem in found), found
    assert all(problem.startswith(("docker-compose.yml: ", "Dockerfile: ")) for problem in found)


def test_a_service_without_a_health_check_is_told() -> None:
    content = yaml.safe_load(COMPOSE)
    del content["services"]["worker-1"]["healthcheck"]
    assert problems(yaml.dump(content), IMAGES) == ["docker-compose.yml: worker-1 has no healthcheck"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("USER 10001:10001\n", "", "stage manager runs as root"),
        ("USER 10001:10001\n", "USER 10001:10001\nUSER root\n", "stage worker runs as root"),
        ('ENTRYPOINT ["python", "-m", "kvpool.cache_service"]', "", "stage manager starts nothing"),
        ('["python", "-m", "kvpool.cache_service"]', "python -m kvpool.cache_service", "a shell takes no signals"),
        ("ENV KVPOOL_CACHE_DIR", "CMD run it\nENV KVPOOL_CACHE_DIR", "stage worker has CMD run it"),
        (
            "FROM base AS worker\n",
            "FROM base AS worker\nRUN apt-get update \\\n  && true\n",
            "stage worker runs apt-get",
        ),
        ("FROM base AS manager\n", "FROM base AS manager\nRUN pip install numpy\n", "stage manager runs pip"),
        ("gcc libc6-dev", "gcc", "stage worker-gpu has no C compiler, which Triton needs at run time"),
        ("FROM worker AS worker-gpu\n", "FROM worker AS worker-gpu\nRUN make\n", "stage worker-gpu runs make"),
        (
            "FROM base AS worker\n",
            "FROM base AS worker\nRUN apt-get install gcc libc6-dev\n",
            "stage worker runs apt-get",
        ),
        ("USER 0:0\n", "USER 0:0\nENTRYPOINT run\n", "stage worker-gpu has ENTRYPOINT run"),
        (
            "ENV TRITON_CACHE_DIR=/var/cache/kvpool/triton",
            "ENV A=b",
            "worker-gpu-1 keeps compiled kernels in the home folder",
        ),
        ("COPY . .", "COPY ../secrets .", "stage kvpool has COPY ../secrets"),
        ("COPY . .", "ADD https://example.org/kvpool.tar /source/", "stage kvpool has ADD"),
        ("ARG PIP_FIND_LINKS\n", "ARG PIP_FIND_LINKS=file:///wheels\n", "names file:///wheels"),
        ("ARG PIP_FIND_LINKS\n", "ARG PIP_FIND_LINKS=/mnt/disk/wheels\n", "names /mnt/disk/wheels"),
        ("=python:3.11-slim", "=python", "starts from python: give it a tag"),
        ("FROM ${PYTHON_IMAGE} AS base", "FROM python:latest AS base", "starts from python:latest"),
    ],
)
def test_a_broken_dockerfile_is_told(old: str, new: str, words: str) -> None:
    assert old in IMAGES
    found = problems(COMPOSE, IMAGES.replace(old, new))
    assert any(words in problem for problem in found), found


def test_comments_and_continued_lines_are_read_as_docker_reads_them() -> None:
    """A path in a comment says nothing; one in the second line of a command counts."""
    assert problems(COMPOSE, IMAGES + "\n# e.g. /mnt/disk\n") == []
    assert problems(COMPOSE, IMAGES + "\nLABEL a=b \\\n    # really\n    c=/mnt/disk\n") != []


def test_the_images_get_every_package() -> None:
    """What pyproject.toml takes packages from must not be kept out by .dockerignore, and nothing else gets in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {PurePosixPath(path).parts[0] for path in project["tool"]["setuptools"]["package-dir"].values()}
    first, *lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert first == "*"
    assert let_in == folders | {"pyproject.toml", "constraints.txt", project["project"]["readme"], "LICENSE"}
    assert all((ROOT / path).exists() for path in let_in)


def test_the_tests_project_disturbs_no_cluster_of_the_users() -> None:
    """Own ports, and none of the variables that the user has set for it; those of builds and of docker stay."""
    found = compose_environment(
        {"KVPOOL_MODEL": "mine", "COMPOSE_PROFILES": "gpu", "KVPOOL_FIND_LINKS": "x", "DOCKER_HOST": "y", "PATH": "z"}
    )
    assert not {"KVPOOL_MODEL", "COMPOSE_PROFILES"} & set(found)
    assert (found["KVPOOL_FIND_LINKS"], found["DOCKER_HOST"], found["PATH"]) == ("x", "y", "z")
    for service, port in PORTS.items():
        variable = f"KVPOOL_PORT_{service.upper().replace('-', '_')}"
        assert found[variable] == str(port)
        assert f"${{{variable}:-" in COMPOSE
        assert f"${{{variable}:-{port}}}" not in COMPOSE


def test_files_name_no_folder_of_this_machine() -> None:
    """Wherever the checkout is, and whoever's Python runs it."""
    here = {str(ROOT), str(Path.home()), sys.prefix} - {"/", "/root"}
    for file in (COMPOSE_FILE, DOCKERFILE, ROOT / "Makefile", *(ROOT / "scripts" / "compose").glob("*.py")):
        assert not [folder for folder in here if folder in file.read_text()], file
