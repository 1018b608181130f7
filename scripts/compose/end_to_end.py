"""Builds the images, runs the tests of tests/compose against containers, and takes everything away again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from .engine import NoEngine, engine
from .project import NAME, ROOT, TAG, compose_command, compose_environment

PROJECT_LABEL = f"label=com.docker.compose.project={NAME}"
IMAGES = "reference=kvpool-*:" + TAG
VARIABLE = "KVPOOL_COMPOSE_TEST"
"""Set: tests/compose is not left out."""


def run(pytest_arguments: list[str]) -> int:
    """Exit status: 0 if every test passed and nothing is left, else 1."""
    # Who ends us politely, as `timeout` does, wants to find nothing left either.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with engine() as settings:
            return _run({**os.environ, **settings}, pytest_arguments)
    except NoEngine as error:
        print(f"make test-compose: {error}", file=sys.stderr)
        return 1


def _run(environment: Mapping[str, str], pytest_arguments: list[str]) -> int:
    compose = compose_environment(environment)
    remove(compose)  # what a run that was killed may have left
    try:
        started = time.monotonic()
        built = subprocess.run(compose_command("build", "manager", "worker-0"), env=compose, cwd=ROOT, check=False)
        if built.returncode != 0:
            print("make test-compose: the images could not be built; see above", file=sys.stderr)
            return 1
        print(f"built in {time.monotonic() - started:.0f} s", flush=True)
        tests = subprocess.run(
            [sys.executable, "-m", "pytest", "tests/compose", *pytest_arguments],
            env={**environment, VARIABLE: "1"},
            cwd=ROOT,
            check=False,
        )
    finally:
        remove(compose)
    left = leftovers(compose)
    for what in left:
        print(f"make test-compose: left behind: {what}", file=sys.stderr)
    return 1 if tests.returncode or left else 0


def remove(environment: Mapping[str, str]) -> None:
    """Containers, volumes, networks and images of the test. The engine's build cache stays: the next build is quick."""
    command = compose_command(
        "--profile", "client", "down", "--volumes", "--remove-orphans", "--rmi", "all", "--timeout", "5"
    )
    subprocess.run(command, env=dict(environment), cwd=ROOT, capture_output=True, check=False)


def leftovers(environment: Mapping[str, str], *, with_images: bool = True) -> list[str]:
    """What of the test's project the engine still has, for people."""
    questions = {
        "container": ["container", "ls", "--all", "--filter", PROJECT_LABEL, "--format", "{{.Names}}"],
        "volume": ["volume", "ls", "--filter", PROJECT_LABEL, "--format", "{{.Name}}"],
        "network": ["network", "ls", "--filter", PROJECT_LABEL, "--format", "{{.Name}}"],
    }
    if with_images:
        questions["image"] = ["image", "ls", "--filter", IMAGES, "--format", "{{.Repository}}:{{.Tag}}"]
    found = []
    for kind, question in questions.items():
        answer = subprocess.run(
            ["docker", *question], env=dict(environment), stdout=subprocess.PIPE, text=True, check=True
        )
        found += [f"{kind} {name}" for name in answer.stdout.split()]
    return found
