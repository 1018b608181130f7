"""For tests of documents: the manager of docs/PROTOCOL.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.protocol_shell import ProtocolShell, serving


@pytest.fixture
def protocol_shell(tmp_path: Path) -> Iterator[ProtocolShell]:
    """A shell next to a manager without workers."""
    with serving(tmp_path) as shell:
        yield shell
