"""Every command in the documents does what it is there for. They are run as they stand, but for what SUBSTITUTIONS says."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
import yaml

from kvpool.cache_service.settings import ManagerSettings
from kvpool.client.cli.app import app
from kvpool.client.cli.commands.up import UpSettings
from kvpool.client.cli.launch.cluster import free_port
from kvpool.client.cli.settings import ClientSettings
from kvpool.process.settings import ProcessSettings, load_settings
from kvpool.worker_service.settings import WorkerSettings
from tests.docs.blocks import ROOT, Block, blocks, inline_code

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
HAVE_TESTS_OF_THEIR_OWN = {"PROTOCOL.md": "tests/docs/test_protocol.py"}

RUN_ELSEWHERE = {
    "make test": "is what runs this",
    "make check": "CI runs it before this",
    "make format": "would write into the checkout",
    "make proto": "would write into the checkout; make check runs the same generator",
    "make test-compose": "needs a container engine, and is itself a test",
    "make test-stubs": "needs compilers of other languages and a package registry, and is itself a test",
    "make soak": "takes twenty minutes, and is itself a test; a few seconds of it run with the tests",
    "make hostile": "attacks a cluster for many minutes, and is itself a test; a small part of it runs with the tests",
    "make live": "kills and freezes services for half an hour, and is itself a test",
    "make simulate": "runs thousands of seeds; 500 run with the tests",
    "make models": "tries nearly two hundred models, and writes into the checkout",
    "make bench": "measures, for many minutes",
    "make bench-serve": "measures, for an hour",
    "make bench-peers": "installs the peers that bench measures against",
    "make gpu": "needs a GPU; tests/gpu runs its miniature on a CPU",
    "make gpu-wheels": "downloads, and needs the network",
}
"""make's targets that are only looked at here, and why."""

SUBSTITUTIONS = {
    # A checkout's own environment is wherever these tests run.
    ".venv/bin/": str(Path(sys.executable).parent) + "/",
    # Two machines are two addresses of this one.
    "10.0.0.1": "127.0.0.2",
    "10.0.0.2": "127.0.0.3",
    # Their GPUs are not here.
    "--workers 8 --device cuda": "--workers 1 --device cpu",
}


class Shell:
    """Runs commands in the checkout against a cluster of its own, which `kvpool up` starts where a document says so."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._environment = {
            **os.environ,
            "KVPOOL_UP_PORT": str(self._port),
            "KVPOOL_MANAGER": f"127.0.0.1:{self._port}",
            "KVPOOL_WORKER_KV_CACHE_MEMORY": "256MiB",
            "KVPOOL_UP_DEVICE": "cpu",
        }
        self._clusters: list[subprocess.Popen[bytes]] = []

    def run(self, command: str) -> str:
        """Run a command to its good end; returns what it printed."""
        done = subprocess.run(
            ["bash", "-c", self.substituted(command)],
            cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, command: str) -> None:
        """Start a cluster and leave it running."""
        name = f"up-{len(self._clusters)}"
        log = self._folder / f"{name}.log"
        # Each stands for a machine of its own.
        environment = {**self._environment, "XDG_STATE_HOME": str(self._folder / name)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                shlex.split(self.substituted(command), comments=True),
                cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._clusters.append(process)
        end = time.monotonic() + 240
        while "ready: in" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)

    def substituted(self, command: str) -> str:
        """The command as it can be run here."""
        for there, here in {**SUBSTITUTIONS, ":50051": f":{self._port}"}.items():
            command = command.replace(there, here)
        return command

    def close(self) -> None:
        for process in reversed(self._clusters):
            process.send_signal(signal.SIGTERM)
        for process in self._clusters:
            assert process.wait(60) == 0


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    try:
        yield shell
    finally:
        shell.close()


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def execute(shell: Shell, command: str) -> None:
    """One command of a document."""
    words = shlex.split(command, comments=True)
    if " ".join(words[:2]) in RUN_ELSEWHERE:
        assert words[1] in make_targets(), command
        shell.run(f"{shlex.join(words)} --dry-run")
    elif words[:2] == ["docker", "compose"]:
        _look_at_compose(words)
    elif words[1:2] == ["up"] and "--help" not in words:
        shell.start(command)
    else:
        shell.run(command)


def _look_at_compose(words: list[str]) -> None:
    """`make test-compose` runs it; here it must at least name what there is."""
    assert words[2] in ("up", "down", "run", "stop"), words
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    if words[2] == "run":
        service = next(word for word in words[3:] if not word.startswith("-"))
        assert service in services
        assert words[words.index(service) + 1] in command_names()


def command_names() -> set[str]:
    """The commands of `kvpool`."""
    return set(typer.main.get_group(app).commands)


def shell_blocks(document: Path) -> list[Block]:
    return [block for block in blocks(document) if block.language == "sh"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_commands_of_a_document_work_in_their_order(document: Path, shell: Shell) -> None:
    if document.name in HAVE_TESTS_OF_THEIR_OWN:
        assert (ROOT / HAVE_TESTS_OF_THEIR_OWN[document.name]).is_file()
        return
    found = shell_blocks(document)
    for block in found:
        for command in block.commands():
            execute(shell, command)


def test_the_python_of_the_readme_talks_to_the_cluster(shell: Shell) -> None:
    (block,) = [block for block in blocks(ROOT / "README.md") if block.language == "python"]
    shell.start(".venv/bin/kvpool up")
    assert "Paris" in shell.run(f".venv/bin/python -c {shlex.quote(block.text)}")


def test_the_settings_file_of_the_readme_is_taken(tmp_path: Path) -> None:
    """Every process reads its table, and there is no table that none reads."""
    (block,) = [block for block in blocks(ROOT / "README.md") if block.language == "toml"]
    path = tmp_path / "kvpool.toml"
    path.write_text(block.text)
    kinds: list[type[ProcessSettings]] = [UpSettings, ManagerSettings, WorkerSettings, ClientSettings]
    tables = tomllib.loads(block.text)
    assert tables.keys() == {kind.table for kind in kinds}
    for kind in kinds:
        settings = load_settings(kind, ["--config", str(path)])
        assert {name: getattr(settings, name) for name in tables[kind.table]} == tables[kind.table]


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_commands_named_in_the_text_exist(document: Path) -> None:
    """`kvpool WORD` and `make TARGET`, wherever they are mentioned."""
    for code in inline_code(document):
        words = code.split()
        if words[0] == "kvpool" and len(words) > 1 and re.fullmatch("[a-z]+", words[1]):
            assert words[1] in command_names(), code
        if words[0] == "make" and len(words) > 1:
            assert words[1] in make_targets(), code
        if words[0] == "python" and words[1:2] == ["-m"]:
            module = ROOT / words[2].replace(".", "/")
            assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file() or "kvpool" in words[2], (
                code
            )


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """To files of the checkout, and to headings."""
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match("[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            names = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in names, target
