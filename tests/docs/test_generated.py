"""The generated documents are what `make docs` writes."""

from __future__ import annotations

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
