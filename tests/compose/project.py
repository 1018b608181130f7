"""The compose project of `make test SUITE=compose`: name, ports, `docker compose` command, and what Docker must offer."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"

NAME = "kvpool-test"
TAG = "test"
PORTS = {"manager": 25051, "worker-0": 25061, "worker-1": 25062, "gateway": 25080}
"""On 127.0.0.1; not the defaults, so that a user's own cluster can run at the same time."""

_SETTINGS = {
    "KVPOOL_TAG": TAG,
    # Two machines' CPUs may differ in what they compute natively; float32 gives the same text on both.
    "KVPOOL_DTYPE": "float32",
    "KVPOOL_THREADS": "1",
    **{f"KVPOOL_PORT_{name.upper().replace('-', '_')}": str(port) for name, port in PORTS.items()},
}
_OF_BUILDS = ("KVPOOL_BUILD_NETWORK", "KVPOOL_FIND_LINKS", "KVPOOL_TORCH_INDEX")
_FILTERS = {"image": f"reference=kvpool-*:{TAG}"}
_INSTALL = (
    "Install Docker Engine 20.10 or newer with its plugins compose (2.20 or newer) and buildx "
    "(https://docs.docker.com/engine/install/), start it, and check that `docker version` works for this user."
)


def compose_command(*arguments: str) -> list[str]:
    """`docker compose …` for the test's project, without the user's `.env` file."""
    project = ["--project-name", NAME, "--file", str(COMPOSE_FILE), "--env-file", "/dev/null"]
    return ["docker", "compose", *project, *arguments]


def compose_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with the test's settings for docker-compose.yml; of the user's own, only those of builds are kept."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in _OF_BUILDS or not name.startswith(("KVPOOL_", "COMPOSE_"))
    }
    return {**kept, **_SETTINGS}


def docker_problem() -> str | None:
    """What is missing to build and run the containers, and what to install; None if all is there."""
    if shutil.which("docker") is None:
        return f"There is no command `docker`. {_INSTALL}"
    for command, problem in (
        ("version", "No Docker engine answers."),
        ("compose version", "Docker has no plugin compose."),
        ("buildx version", "Docker has no plugin buildx."),
    ):
        if subprocess.run(["docker", *command.split()], capture_output=True, check=False).returncode != 0:
            return f"{problem} {_INSTALL}"
    return None


def leftovers(*kinds: str) -> list[str]:
    """What the engine still has of the project. Kinds: container, volume, network, image."""
    found = []
    for kind in kinds:
        filter_ = _FILTERS.get(kind, f"label=com.docker.compose.project={NAME}")
        command = ["docker", kind, "ls", "--quiet", "--filter", filter_, *(["--all"] if kind == "container" else [])]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found += [f"{kind} {name}" for name in answer.stdout.split()]
    return found
