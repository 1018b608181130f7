"""`make test SUITE=compose`: what it needs of Docker, and that it leaves a user's own cluster alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.compose.project import COMPOSE_FILE, PORTS, compose_environment, docker_problem


@pytest.mark.parametrize(
    ("works", "words"),
    [
        (None, "There is no command `docker`"),
        ("nothing", "No Docker engine answers"),
        ("version", "Docker has no plugin compose"),
        ("version | compose", "Docker has no plugin buildx"),
        ("version | compose | buildx", None),
    ],
)
def test_what_docker_lacks_is_named_with_what_to_install(
    works: str | None, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`docker` is a script here, which fails for all but these first arguments."""
    if works is not None:
        docker = tmp_path / "docker"
        docker.write_text(f'#!{shutil.which("sh")}\ncase "$1" in {works}) exit 0;; esac\nexit 1\n')
        docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = docker_problem()
    if words is None:
        assert problem is None
    else:
        assert problem is not None
        assert words in problem
        assert "https://docs.docker.com/engine/install/" in problem


def test_the_project_has_its_own_ports_and_settings() -> None:
    """Of the user's variables only those of builds and of Docker itself are kept."""
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
