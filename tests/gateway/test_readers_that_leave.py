"""Readers that go away in the middle; `python -m tests.gateway.leaving` does it a thousand times, and looks at memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.leaving import leaving

NUM_READERS = 30
"""Each way to leave meets each moment, and streams of one to three answers."""


@pytest.mark.slow
async def test_whatever_the_way_and_the_moment_nothing_stays_held(tmp_path: Path) -> None:
    """Real processes; the worker is in the middle of a step, the gateway in the middle of a write."""
    found = await leaving(NUM_READERS, tmp_path)
    assert len(found.seconds) == NUM_READERS
    assert found.violations == []
