"""Builds of the step, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def build_folder(pytestconfig: pytest.Config) -> Path:
    """In pytest's cache folder: what is compiled serves later runs."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("native")
