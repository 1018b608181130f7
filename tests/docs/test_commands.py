"""Every command in README and docs is run, on one cluster, and prints what is shown; NOT_RUN lists the others and says why."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
import yaml

from kvpool.cache_service.settings import ManagerSettings
from kvpool.cli.app import app
from kvpool.cli.commands.up import UpSettings
from kvpool.cli.launch.cluster import free_port
from kvpool.cli.on_ray.settings import RaySettings
from kvpool.cli.settings import ClientSettings
from kvpool.gateway.settings import GatewaySettings
from kvpool.process.settings import ProcessSettings, load_settings
from kvpool.worker_service.settings import WorkerSettings
from scripts.protos import SITE
from tests.client.up_here import UpHere
from tests.docs.blocks import ROOT, Block, blocks, here, inline_code
from tests.docs.programs import run_here, run_in_shell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PACKAGES = [
    ROOT,
    SITE,
    *(ROOT / name for name in ("cache_service", "cache_service/core", "worker_service", "client", "gateway", "docs")),
]
MAKEFILE = ROOT / "Makefile"
OPERATING = ROOT / "docs" / "OPERATING.md"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_HERE = [document for document in DOCUMENTS if document.name != "PROTOCOL.md"]
"""tests/docs/test_protocol.py runs the calls of that one."""
WRITTEN = [*DOCUMENTS, ROOT / "CHANGELOG.md", ROOT / "examples" / "stubs" / "README.md"]

NOT_RUN = {
    "make demo": "starts a cluster of its own; tests/examples/test_demo.py does it, with processes that are forked",
    "make test": "is what runs this, or needs a browser, containers, Prometheus, Ray or compilers",
    "make prove": "takes long; a small part of each kind runs with the tests",
    "make check": "CI runs it before this",
    "make format": "would write into the checkout",
    "make docs": "would write into the checkout; make check and tests/docs/test_generated.py run its generators",
    "make bench": "measures, for many minutes, or installs what it measures against",
    "make gpu": "needs a GPU; tests/gpu runs its miniature on a CPU",
    "docker build": "needs a container engine; make test SUITE=compose builds these targets",
    "helm install": "needs a cluster; make test SUITE=helm renders what it would install",
    "RAY_USAGE_STATS_ENABLED=0 ray start": "needs Ray and several machines",
    ".venv/bin/kvpool ray": "needs a Ray cluster; tests/on_ray has one",
    "docker compose": "needs a container engine; make test SUITE=compose runs these commands",
    ".venv/bin/kvpool worker --worker-id": "runs until it is stopped; tests/cluster/test_services_that_fail.py does it",
    ".venv/bin/kvpool manager --host": "needs several machines; tests/cluster/test_second_manager.py has two managers",
    ".venv/bin/kvpool worker --manager": "likewise",
    ".venv/bin/kvpool status --manager": "likewise",
    ".venv/bin/kvpool gateway --manager": "runs until it is stopped; tests/gateway does it",
    ".venv/bin/kvpool up --workers 8 --device cuda": "needs GPUs and two machines; tests/cli/test_cli_up.py joins two clusters",
}
"""How commands begin that are only looked at here, and why."""


class Shell:
    """Runs commands in the checkout against one cluster, which the first `kvpool up` of a document starts, with forked workers:
    tests/cli/test_cli_up.py starts the program."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self._http_port = str(free_port())
        """Instead of the documents' 8000."""
        self._environment = {**os.environ, "KVPOOL_MANAGER": f"127.0.0.1:{port}", "XDG_STATE_HOME": str(folder)}
        self._flags = ("--port", str(port), "--device", "cpu", "--state-dir", str(folder))
        self._cluster: UpHere | None = None

    def run(self, command: str) -> str:
        """Run a command to its good end; returns what it printed."""
        if (printed := run_here(command, self._environment)) is not None:
            return printed
        return run_in_shell(self._here(command), self._environment)

    def _here(self, command: str) -> str:
        """With this environment's programs, and a port of its own."""
        command = re.sub(r"(?<=--http )8000\b", self._http_port, here(command))
        return command.replace("127.0.0.1:8000", f"127.0.0.1:{self._http_port}")

    def up(self, command: str = ".venv/bin/kvpool up --workers 2 --http 8000") -> str:
        """Start the cluster unless it runs; returns its log, up to where it is ready at least."""
        if self._cluster is None:
            self._cluster = UpHere([*shlex.split(self._here(command), comments=True)[2:], *self._flags])
            self._cluster.start()
        return self._cluster.until("ready: in")

    def close(self) -> None:
        """Stop the cluster; it must end well."""
        if self._cluster is not None:
            assert self._cluster.end() == 0


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("shell"))
    try:
        yield shell
    finally:
        shell.close()


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE))


def execute(shell: Shell, command: str) -> str:
    """One command of a document; returns what it printed."""
    words = shlex.split(command, comments=True)
    plain = shlex.join(words)
    if any(f"{plain} ".startswith(f"{start} ") for start in NOT_RUN):
        if words[0] == "make":
            assert words[1] in make_targets(), command
            shell.run(f"{plain} --dry-run")
        elif words[:2] == ["docker", "build"]:
            assert f" AS {words[words.index('--target') + 1]}\n" in (ROOT / "Dockerfile").read_text()
        elif words[0] == "docker":
            _look_at_compose(words)
        elif words[0] == "helm":
            _look_at_chart(words)
    elif words[1:2] == ["up"] and "--help" not in words:
        return shell.up(command)
    else:
        return shell.run(command)
    return ""


def assert_shows(output: str, shown: str) -> None:
    """The output has what a document shows of it: … is any text, a number any number, a space any white space."""
    pattern = ""
    for part in re.split(r"(…|\d[\d,.]*|\s+)", shown.strip()):
        if part == "…":
            pattern += ".*?"
        elif part[:1].isdigit():
            pattern += r"\d[\d,.]*"
        else:
            pattern += r"\s+" if part.isspace() else re.escape(part)
    assert re.search(pattern, output, re.DOTALL), f"{output}\nis not what is shown:\n{shown}"


def _look_at_compose(words: list[str]) -> None:
    """`make test SUITE=compose` runs it; here it must at least name what there is."""
    if words[2] == "--profile":
        words = [*words[:2], *words[4:]]
    assert words[2] in ("up", "down", "run", "stop"), words
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    if words[2] == "run":
        service = next(word for word in words[3:] if not word.startswith("-"))
        assert service in services
        assert words[words.index(service) + 1] in command_names()


def _look_at_chart(words: list[str]) -> None:
    """It names the chart, and values that it has."""
    values = yaml.safe_load((ROOT / words[3] / "values.yaml").read_text())
    names = [words[index + 1].partition("=")[0] for index, word in enumerate(words) if word == "--set"]
    assert names
    for name in names:
        section, _, value = name.partition(".")
        assert value in values[section], name


def command_names() -> set[str]:
    return set(typer.main.get_group(app).commands)


@pytest.mark.parametrize("document", RUN_HERE, ids=lambda path: path.name)
def test_the_commands_and_programs_of_a_document_work_in_their_order(document: Path, shell: Shell) -> None:
    output = ""
    found = blocks(document)
    for block, following in zip(found, [*found[1:], Block("", "")], strict=False):
        if document.name == "LEARN.md" and "text" in (block.language, following.language):
            continue  # tests/docs/test_learn.py runs these, and compares the output to the letter
        if block.language == "sh":
            output = "".join([execute(shell, command) for command in block.commands()])
        elif block.language == "python":
            shell.up()
            output = shell.run(f".venv/bin/python -c {shlex.quote(block.text)}")
            assert "Paris" in output
        elif block.language == "text":
            assert_shows(output, block.text)


def test_the_systemd_units_start_services_with_settings_that_these_take() -> None:
    units = [block.text for block in blocks(OPERATING) if block.language == "ini"]
    kinds: dict[str, type[ProcessSettings]] = {"manager": ManagerSettings, "worker": WorkerSettings}
    started = []
    for unit in units:
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(unit)
        program, service, *arguments = shlex.split(parser["Service"]["ExecStart"])
        assert Path(program).name == "kvpool"
        load_settings(kinds[service], [argument.replace("%i", "0") for argument in arguments])
        started.append(service)
    assert started == list(kinds)


def test_the_settings_file_is_taken(tmp_path: Path) -> None:
    (block,) = [block for block in blocks(OPERATING) if block.language == "toml"]
    path = tmp_path / "kvpool.toml"
    path.write_text(block.text)
    kinds: list[type[ProcessSettings]] = [
        UpSettings,
        RaySettings,
        ManagerSettings,
        WorkerSettings,
        GatewaySettings,
        ClientSettings,
    ]
    tables = tomllib.loads(block.text)
    assert tables.keys() == {kind.table for kind in kinds}
    for kind in kinds:
        settings = load_settings(kind, ["--config", str(path)])
        assert {name: getattr(settings, name) for name in tables[kind.table]} == tables[kind.table]


@pytest.mark.parametrize("document", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_files_named_in_the_text_exist(document: Path) -> None:
    for code in inline_code(document):
        if path := re.match(r"[\w./-]+/[\w.-]+\.(?:py|proto|md|yml|toml)\b", code):
            assert any((folder / path[0]).exists() for folder in PACKAGES), code
        words = code.split()
        if words[0] == "kvpool" and len(words) > 1 and re.fullmatch("[a-z]+", words[1]):
            assert words[1] in command_names(), code
        if words[0] == "make" and len(words) > 1:
            assert words[1] in make_targets(), code
            for choice in re.findall(r"(?:SUITE|KIND)=[a-z]+", code):
                assert f'@echo "  {choice} ' in MAKEFILE.read_text(encoding="utf-8"), code
        if words[0] == "python" and words[1:2] == ["-m"]:
            module = ROOT / words[2].replace(".", "/")
            assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file() or "kvpool" in words[2], (
                code
            )


@pytest.mark.parametrize("document", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
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
