"""Generated documents are what `make docs` writes; CONTRIBUTING.md's table names files that exist, and all places of an option."""

from __future__ import annotations

import re

import kvpool.client
from scripts.docs.api import described_names, document
from scripts.docs.pictures import pictures
from tests.docs.blocks import ROOT

DOCS = ROOT / "docs"


def test_the_reference_of_the_client_is_what_its_docstrings_say_and_leaves_no_public_name_out() -> None:
    assert (DOCS / "API.md").read_text(encoding="utf-8") == document(), "run `make docs` and commit"
    assert described_names() == set(kvpool.client.__all__)


def test_the_pictures_are_what_the_commands_print() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "images").glob("*.svg")}
    assert committed == pictures(), "run `make docs` and commit"


# -- the table of CONTRIBUTING.md


OPTION = "min_p"
"""Stands for all options; its name has no other meaning."""
CODE = ("client", "cli", "common", "gateway", "protos", "worker_service")
GENERATED = (".pyi", "_pb2.py", "_pb2_grpc.py")


def rows() -> list[tuple[str, list[str]]]:
    """Each idea with the paths that its row names, a short name with the folder of the path before it or its component."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| idea | open first |")[2].partition("\n\n")[0]
    cells = [row.strip("|").split("|") for row in table.splitlines()[2:]]
    return [(idea.strip(), re.findall(r"`([\w./-]+(?:\.\w+|/))`", "".join(others))) for idea, *others in cells]


def exists(path: str, first: str) -> bool:
    """From the root, beside the first file of the row, or below its component or the protos."""
    places = (ROOT, (ROOT / first).parent, ROOT / first.split("/")[0], ROOT / "protos/kvpool/v1")
    return any((place / path).exists() for place in places)


def test_every_file_of_the_table_exists() -> None:
    assert len(rows()) > 20
    assert [
        (idea, path) for idea, (first, *others) in rows() for path in (first, *others) if not exists(path, first)
    ] == []


def test_the_row_of_a_sampling_option_has_all_its_places() -> None:
    ((_, listed),) = [row for row in rows() if row[0] == "add a sampling option"]
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".proto")]
    named = {
        str(path.relative_to(ROOT))
        for path in files
        if not path.is_symlink()
        and not path.name.endswith(GENERATED)
        and re.search(rf"\b{OPTION}\b", path.read_text("utf-8"))
    }
    folders = tuple(path for path in listed if path.endswith("/"))
    assert {path for path in named if not path.startswith(folders)} == set(listed) - set(folders)
    assert all(any(path.startswith(folder) for path in named) for folder in folders)
