"""Tests with a real Prometheus: only `make test SUITE=observe` runs them, because they need its binary."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.conftest import pytest_runtest_makereport
from tests.observe.prometheus import missing

__all__ = ["pytest_runtest_makereport"]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Without the binary there is nothing to see: a failure, and no reason to leave tests out. Other tests do not need it."""
    here = Path(__file__).parent
    if any(here in item.path.parents for item in session.items) and (why := missing()):
        pytest.exit(why, returncode=1)
