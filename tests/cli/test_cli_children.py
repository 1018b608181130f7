"""Children live and die together: a signal stops all, nothing is left behind, one that dies is reported and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.cli.launch.children import MAX_LINE_BYTES, ChildExit, Children, ChildSpec
from kvpool.cli.launch.restarts import MAX_DEATHS, GaveUp, Restarts, _Child
from tests.client.processes import is_alive
from tests.until import until

SLEEPER = "import time; print('ready', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)


class Log:
    """Collects lines and lets a test wait for one."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    async def wait_for(self, name: str, line: str) -> None:
        await until(lambda: (name, line) in self.lines)


def child(name: str, script: str, *arguments: str, **environment: str) -> ChildSpec:
    return ChildSpec(name, [sys.executable, "-I", "-S", "-c", script, *arguments], environment)


async def test_a_death_is_reported_with_its_last_words() -> None:
    log = Log()
    async with Children(log) as children:
        await children.start(child("manager", SLEEPER))
        await children.start(child("worker-0", "import sys; print('out of memory'); sys.exit(3)"))
        ended = await children.wait_for_exit()
        assert ended == ChildExit("worker-0", 3)
        assert str(ended) == "worker-0 ended with exit status 3"
        assert ("worker-0", "out of memory") in log.lines
        await children.start(child("worker-1", "import os; os.kill(os.getpid(), 9)"))
        assert str(await children.wait_for_exit()) == "worker-1 was ended by SIGKILL"


async def test_leaving_the_block_stops_every_child_and_the_manager_last() -> None:
    polite = (
        "import os, signal, sys, time\n"
        "def leave(*_):\n    time.sleep(0.2); os.write(1, b'bye\\n'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave); print(os.getpid(), flush=True)\n" + SLEEPER
    )
    log = Log()
    async with Children(log, last="manager") as children:
        for name in ("manager", "worker-0", "worker-1"):
            await children.start(child(name, polite))
            await log.wait_for(name, "ready")
        pids = [int(line) for _, line in log.lines if line.isdigit()]
        assert [is_alive(pid) for pid in pids] == [True] * 3
    left = [name for name, line in log.lines if line == "bye"]
    assert sorted(left) == ["manager", "worker-0", "worker-1"]
    assert left[-1] == "manager"
    assert not any(is_alive(pid) for pid in pids)


async def test_a_child_that_does_not_listen_is_killed_after_the_grace() -> None:
    log = Log()
    async with Children(log, grace_seconds=0.3) as children:
        await children.start(child("worker-0", STUBBORN))
        await log.wait_for("worker-0", "ready")
        started = time.monotonic()
        assert await children.stop() == [ChildExit("worker-0", -signal.SIGKILL)]
        assert 0.25 < time.monotonic() - started < 60


async def test_cancelling_twice_does_not_leave_children_behind() -> None:
    """The first Ctrl-C asks, the second kills; neither walks away."""
    log = Log()

    async def run() -> None:
        async with Children(log, grace_seconds=60) as children:
            await children.start(child("worker-0", "import os; print(os.getpid(), flush=True)\n" + STUBBORN))
            await children.wait_for_exit()

    task = asyncio.create_task(run())
    await log.wait_for("worker-0", "ready")
    task.cancel()
    await asyncio.sleep(0.1)
    assert not task.done()
    task.cancel()
    await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 30)
    assert not is_alive(int(log.lines[0][1]))


async def test_children_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    """kill -9 leaves it no time to stop anybody: the kernel does."""
    script = (
        "import asyncio, sys\n"
        "from kvpool.cli.launch.children import Children, ChildSpec\n"
        "async def run():\n"
        "    async with Children(lambda name, line: print(line, flush=True)) as children:\n"
        "        command = [sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(600)']\n"
        "        await children.start(ChildSpec('worker-0', command))\n"
        "        await children.wait_for_exit()\n"
        "asyncio.run(run())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", "common"])}
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 20))
    assert is_alive(pid)
    parent.kill()
    await parent.wait()
    await until(lambda: not is_alive(pid))


async def test_long_and_broken_lines_are_handed_on_in_pieces() -> None:
    script = "import sys; sys.stdout.buffer.write(b'x' * 300000 + b'\\n\\xff end\\nlast')"
    log = Log()
    async with Children(log) as children:
        await children.start(child("worker-0", script))
        await children.wait_for_exit()
    lines = [line for _, line in log.lines]
    assert max(len(line) for line in lines) <= 65536 + MAX_LINE_BYTES
    assert "".join(lines[:-2]) == "x" * 300000
    assert lines[-2:] == ["\ufffd end", "last"]


async def test_a_log_that_cannot_be_written_ends_the_wait() -> None:
    """`kvpool up | head`: nobody would see what happens any more, so it ends, and takes the children along."""

    def gone(name: str, line: str) -> None:
        pids.append(int(line))
        raise BrokenPipeError

    pids: list[int] = []
    async with Children(gone) as children:
        script = f"import os, time; print(os.getpid(), flush=True); {SLEEPER}"
        await children.start(child("worker-0", script))
        with pytest.raises(BrokenPipeError):
            await asyncio.wait_for(children.wait_for_exit(), 20)
    assert not is_alive(pids[0])


async def test_a_child_gets_its_own_variables_on_top_of_ours() -> None:
    log = Log()
    async with Children(log) as children:
        script = "import os; print(os.environ['OMP_NUM_THREADS'], 'PATH' in os.environ)"
        await children.start(child("worker-0", script, OMP_NUM_THREADS="5"))
        await children.wait_for_exit()
    assert log.lines == [("worker-0", "5 True")]


# -- restarts: with a bound; one that ends with status 0 has left


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
