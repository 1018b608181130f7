"""Imports at the start of a process: no collection while they run, collections as before afterwards."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from kvpool.process.imports import without_collections


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """It would be frozen too, and kept."""
    gc.collect()


def test_imported_objects_are_left_out_of_collections() -> None:
    objects: list[Any] = []
    with without_collections():
        assert not gc.isenabled()
        objects.append([objects])
        num_frozen = gc.get_freeze_count()
    assert gc.isenabled()
    assert gc.get_freeze_count() > num_frozen
    assert not any(found is objects for found in gc.get_objects())


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert gc.isenabled()
