"""A child that dies is started again, with a bound; one that ends with status 0 has left."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.cli.launch.children import Children, ChildSpec
from kvpool.cli.launch.restarts import MAX_DEATHS, GaveUp, Restarts, _Child
from tests.cli.test_cli_children import SLEEPER, child


def dies_first(name: str, folder: Path, times: int) -> ChildSpec:
    """A child that fails so often before it ends well; it counts in a file of the folder."""
    count = str(folder / "count")
    script = (
        f"import os, sys; file = open({count!r}, 'a'); file.write('x'); file.close(); "
        f"sys.exit(os.stat({count!r}).st_size <= {times})"
    )
    return child(name, script)


async def kept(
    monkeypatch: pytest.MonkeyPatch,
    *specs: ChildSpec,
    on_event: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Start the children, of which the manager is vital, and restart them until they have left; returns the events,
    without those that name a process id."""
    monkeypatch.setattr("kvpool.cli.launch.restarts._FIRST_PAUSE_SECONDS", 0.001)
    events: list[str] = []

    def note(line: str) -> None:
        if "(pid " not in line:
            events.append(line)
        on_event(line)

    async with Children(lambda name, line: None) as children:
        for spec in specs:
            await children.start(spec)
        await Restarts(children, {spec.name: spec for spec in specs}, "manager", note, clock).keep()
    return events


async def test_a_death_is_reported_and_the_child_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines: list[str] = []
    told = await kept(monkeypatch, child("manager", SLEEPER), dies_first("a", tmp_path, 2), on_event=lines.append)
    assert told == ["a ended with exit status 1; starting it again"] * 2 + ["a has left"]
    assert len({line for line in lines if line.startswith("a was started again (pid ")}) == 2


async def test_the_vital_one_may_not_leave_either(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GaveUp, match=f"manager ended with exit status 0, the {MAX_DEATHS}th time"):
        await kept(monkeypatch, child("manager", "pass"), child("a", SLEEPER))


async def test_a_child_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvpool.cli.launch.restarts._LONGEST_PAUSE_SECONDS", 0.01)
    go = tmp_path / "go"
    told = await kept(
        monkeypatch,
        child("manager", SLEEPER),
        dies_first("refused", tmp_path, MAX_DEATHS + 2),
        child("healthy", f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"),
        on_event=lambda line: go.touch() if line == "refused has left" else None,
    )
    assert told == [
        *["refused ended with exit status 1; starting it again"] * (MAX_DEATHS - 1),
        *["refused ended with exit status 1; its log above says why. It dies repeatedly: next start in 0 s"] * 3,
        "refused has left",
        "healthy has left",
    ]


async def test_a_long_pause_of_one_child_is_none_for_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pause_seconds = _Child.pause_seconds

    def pause(self: _Child) -> float:
        return 3600.0 if self.is_failing(time.monotonic()) else pause_seconds(self)

    monkeypatch.setattr(_Child, "pause_seconds", pause)
    count, lives = tmp_path / "count", tmp_path / "lives"
    healthy = f"""
import os, sys, time
while not os.path.exists({str(count)!r}) or os.stat({str(count)!r}).st_size < {MAX_DEATHS}:
    time.sleep(0.01)
time.sleep(0.2 if not os.path.exists({str(lives)!r}) else 0)
open({str(lives)!r}, "a").write("x")
sys.exit(os.stat({str(lives)!r}).st_size < 2)
"""
    with pytest.raises(GaveUp, match=r"the others fail|5th time"):
        await kept(
            monkeypatch, child("manager", SLEEPER), dies_first("refused", tmp_path, 1000), child("healthy", healthy)
        )
    assert lives.read_text() == "xx"
    assert count.read_text() == "x" * MAX_DEATHS


async def test_it_gives_up_when_all_but_the_vital_one_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        GaveUp, match=f"ended with exit status 3, the {MAX_DEATHS}th time within 60 s; its log above says why"
    ):
        await kept(
            monkeypatch,
            child("manager", SLEEPER),
            child("a", "import sys; sys.exit(3)"),
            child("b", "import sys; sys.exit(3)"),
        )


async def test_deaths_that_are_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deaths = 2 * MAX_DEATHS
    hours = iter(range(1000))
    specs = (child("manager", SLEEPER), dies_first("a", tmp_path, deaths))
    assert len(await kept(monkeypatch, *specs, clock=lambda: 3600.0 * next(hours))) == deaths + 1
