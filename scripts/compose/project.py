"""The project that the compose test makes of docker-compose.yml: its name, its ports, and how it is called."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "Dockerfile"

NAME = "kvpool-test"
TAG = "test"
PORTS = {"manager": 25051, "worker-0": 25061, "worker-1": 25062}
"""On 127.0.0.1; others than the defaults, so that a cluster of the user's goes on."""

_SETTINGS = {
    "KVPOOL_TAG": TAG,
    # Two machines' CPUs may differ in what they compute natively; float32 says the same everywhere.
    "KVPOOL_DTYPE": "float32",
    "KVPOOL_THREADS": "1",
    **{f"KVPOOL_PORT_{name.upper().replace('-', '_')}": str(port) for name, port in PORTS.items()},
}
_OF_BUILDS = ("KVPOOL_BUILD_NETWORK", "KVPOOL_FIND_LINKS", "KVPOOL_TORCH_INDEX")


def compose_command(*arguments: str) -> list[str]:
    """`docker compose …` for the test's project. A file .env of the user's has no say in it."""
    project = ["--project-name", NAME, "--file", str(COMPOSE_FILE), "--env-file", "/dev/null"]
    return ["docker", "compose", *project, *arguments]


def compose_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with the test's settings for docker-compose.yml, and no others but those of builds."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in _OF_BUILDS or not name.startswith(("KVPOOL_", "COMPOSE_"))
    }
    return {**kept, **_SETTINGS}
