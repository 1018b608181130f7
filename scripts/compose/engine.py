"""A Docker engine to test with: the one that answers, else one that is started for the test and stopped after it."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from .project import ROOT

LOCAL_ENGINE = ROOT.parent / "shared" / "tools" / "local-engine.sh"
"""`up` starts an engine and prints `export NAME=value …`; `down` stops it."""


class NoEngine(Exception):
    """There is nothing to run containers with; the message says what to install."""


@contextmanager
def engine() -> Iterator[dict[str, str]]:
    """What to add to the environment so that `docker compose` reaches an engine, while the context lasts. Raises NoEngine."""
    problem = what_is_missing()
    if problem is None:
        yield {}
        return
    if not LOCAL_ENGINE.is_file():
        raise NoEngine(
            f"{problem}. Install Docker Engine 20.10 or newer with its plugins compose (2.20 or newer) and buildx "
            "(https://docs.docker.com/engine/install/), start it, and see that `docker version` works for this user."
        )
    print(f"{problem}: starting one with {LOCAL_ENGINE.name}", flush=True)
    try:
        up = subprocess.run(["bash", LOCAL_ENGINE, "up"], stdout=subprocess.PIPE, text=True, check=False)
        if up.returncode != 0:
            raise NoEngine(f"{problem}, and `{LOCAL_ENGINE.name} up` ended with status {up.returncode}; see above.")
        yield build_settings(exported(up.stdout))
    finally:
        print(f"stopping the engine with {LOCAL_ENGINE.name}", flush=True)
        subprocess.run(["bash", LOCAL_ENGINE, "down"], check=False)


def what_is_missing() -> str | None:
    """None if an engine answers and compose is there."""
    for command, problem in (
        (["docker", "--version"], "There is no command `docker`"),
        (["docker", "version"], "No Docker engine answers"),
        (["docker", "compose", "version"], "Docker has no plugin compose"),
        (["docker", "buildx", "version"], "Docker has no plugin buildx"),
    ):
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            return problem
        if done.returncode != 0:
            return problem
    return None


def exported(script: str) -> dict[str, str]:
    """The variables that a script of `export NAME=value …` lines sets."""
    words = [word for line in script.splitlines() if line.startswith("export ") for word in shlex.split(line)[1:]]
    return dict(word.split("=", 1) for word in words)


def build_settings(environment: dict[str, str]) -> dict[str, str]:
    """With what docker-compose.yml has to be told for builds on the engine that was started."""
    settings = {**environment, "KVPOOL_BUILD_NETWORK": "host"}
    if wheels := environment.get("PIP_FIND_LINKS_URL"):
        settings |= {"KVPOOL_FIND_LINKS": wheels, "KVPOOL_TORCH_INDEX": ""}
    return settings
