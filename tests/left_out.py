"""Tests that need what this machine does not have, or that another command runs: left out, and counted in the summary."""

from __future__ import annotations

from typing import Any

import pytest

_COUNTS = pytest.StashKey[dict[str, int]]()


def leave_out(config: pytest.Config, items: list[pytest.Item], unwanted: list[pytest.Item], why: str) -> None:
    """Deselect the tests; the summary has their number, followed by `why`."""
    if not unwanted:
        return
    config.stash.setdefault(_COUNTS, {})[why] = len(unwanted)
    if hasattr(config, "workeroutput"):  # a process of pytest-xdist, which prints no summary
        config.workeroutput["left_out"] = config.stash[_COUNTS]
    config.hook.pytest_deselected(items=unwanted)
    items[:] = [item for item in items if item not in unwanted]


def take_over(node: Any) -> None:
    """Take the counts of a process of pytest-xdist. Each of them collects all tests, so these are the same."""
    node.config.stash[_COUNTS] = getattr(node, "workeroutput", {}).get("left_out", {})


def lines(config: pytest.Config) -> list[str]:
    return [f"{count} {why}" for why, count in config.stash.get(_COUNTS, {}).items()]
