"""Every file has one import name, which begins with kvpool: a second one would be a second module, with classes of its own."""

from __future__ import annotations

import re
from pathlib import Path

from tests.python_program import ROOT, run_python

COMPONENTS = ("cache_service", "worker_service", "client", "cli", "load", "walkthrough", "gateway")
# Also in strings, which name modules for monkeypatch and programs for other processes.
SECOND_NAME = re.compile(
    rf"""(?:^\s*|["';]\s*)(?:from|import)\ (?:{"|".join(COMPONENTS)})[. ]   # from client.errors import …
    | ["'](?:{"|".join(COMPONENTS)})\.(?!log\b)[a-z_]+\.             # "client.errors.…"
    | "-m",\ "(?:{"|".join(COMPONENTS)})["._]                        # python -m cache_service
    """,
    re.VERBOSE,
)


def test_no_file_is_imported_under_a_second_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("tests", "bench", "examples", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
        for line in path.read_text(encoding="utf-8").splitlines()
        if SECOND_NAME.search(line)
    ]
    assert found == []


def test_the_pattern_sees_what_it_is_for() -> None:
    for line in (
        "from client import Client",
        "    from worker_service.model.load import load_model",
        "import cache_service.election.epoch",
        'monkeypatch.setattr("cli.launch.PAUSE", 1)',
        'command = [sys.executable, "-m", "worker_service"]',
        "program = 'import sys; from load import sample'",
    ):
        assert SECOND_NAME.search(line), line
    for line in (
        "from kvpool.client import Client",
        "from kvpool.model import load as load_module",
        "from tests.client import x",
        'log = folder / "client.log"',
    ):
        assert not SECOND_NAME.search(line), line


def test_each_component_is_a_link_to_its_folder() -> None:
    """Tools that read paths find kvpool.client there. Relative, so that a checkout may be moved."""
    links = {path.name: path.readlink() for path in (ROOT / "common/kvpool").iterdir() if path.is_symlink()}
    expected = {name: Path("../..") / name for name in COMPONENTS} | {"v1": Path("../../protos/kvpool/v1")}
    assert links == expected


def test_the_whole_of_kvpool_is_found_by_its_path() -> None:
    program = "import kvpool.process, kvpool.cache_service.core; print(kvpool.cache_service.core.__file__)"
    done = run_python("-S", "-c", program, PYTHONPATH=str(ROOT / "common"))
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(ROOT / "common")
