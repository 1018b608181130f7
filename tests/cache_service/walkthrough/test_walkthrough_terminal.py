"""The walkthrough on a terminal: keys, sizes, and the terminal as it was before, however it ends."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.cache_service.walkthrough.terminal_user import HIDE, SHOW, at_terminal

FORWARDS = [b"\x1b[C", b"\x1bOC", b"n", b" ", b"\r", b"\n"]
BACKWARDS = [b"\x1b[D", b"\x1bOD", b"b", b"\x7f", b"\x08"]


def test_keys_go_forwards_and_backwards() -> None:
    """Every key that the help names, one step each."""
    with at_terminal("prefix") as user:
        first = user.read_until("prefix 1/7")
        for back in BACKWARDS:
            user.press(FORWARDS[0])
            user.read_until("prefix 2/7")
            user.press(back)
            assert user.read_until("prefix 1/7") == first
        for number, forwards in enumerate(FORWARDS, 2):
            user.press(forwards)
            user.read_until(f"prefix {number}/7")


def test_home_and_end_go_to_the_first_and_the_last_step() -> None:
    """In the codes of several terminals; beyond either end nothing moves."""
    with at_terminal("chain") as user:
        user.read_until("chain 1/8")
        for home, end in ((b"\x1b[H", b"\x1b[F"), (b"\x1b[1~", b"\x1b[4~"), (b"\x1bOH", b"\x1bOF")):
            user.press(end)
            user.read_until("chain 8/8", "the end")
            user.press(b"n" + home)
            user.read_until("chain 1/8")
        user.press(b"bbn")
        user.read_until("chain 2/8")


def test_going_back_shows_what_was_there_before() -> None:
    """Eight steps there and back: the same eight pictures."""
    with at_terminal("eviction", columns=130, rows=60) as user:
        seen = [user.read_until("eviction 1/8")]
        for number in range(2, 9):
            user.press(b"n")
            seen.append(user.read_until(f"eviction {number}/8"))
        for number in range(7, 0, -1):
            user.press(b"b")
            assert user.read_until(f"eviction {number}/8") == seen[number - 1]
    assert len(set(seen)) == 8


@pytest.mark.parametrize(
    ("end", "status"),
    [
        *((b"q", 0), (b"Q", 0), (b"\x04", 0), (b"\x1b", 0), (b"\x03", 130)),
        *((signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)),
    ],
)
def test_a_key_or_a_signal_ends_it_and_the_terminal_is_as_before(end: bytes | signal.Signals, status: int) -> None:
    """q, Ctrl-D, Escape, Ctrl-C; and what others send."""
    with at_terminal("allocation") as user:
        user.read_until("allocation 1/7")
        assert user.settings() != user.settings_before
        if isinstance(end, bytes):
            user.press(end)
        else:
            user.process.send_signal(end)
        assert user.end() == status
        assert user.settings() == user.settings_before
        assert user.output.endswith(HIDE)


def test_an_exception_leaves_the_terminal_as_before() -> None:
    """And is told on the ordinary screen, where it can be read."""
    code = """
from rich.console import Console
from kvpool.cache_service.walkthrough.__main__ import CASES
from kvpool.cache_service.walkthrough.recording import record
from kvpool.cache_service.walkthrough.viewer import view
case = CASES["prefix"]
steps = record(case)
steps[3] = steps[3]._replace(after=None)
view(case, steps, Console())
"""
    with at_terminal(code=code) as user:
        assert user.end() == 1
        assert user.settings() == user.settings_before
        shown, hidden = user.output.index(SHOW), user.output.index(HIDE)
        assert shown < hidden < user.output.index(b"Traceback")


def test_a_terminal_that_goes_away_ends_it() -> None:
    """Nobody is left to press q."""
    with at_terminal("prefix") as user:
        user.read_until("prefix 1/7")
        user.hang_up()
        assert user.process.wait(60) in (0, 128 + signal.SIGHUP)


def test_ctrl_z_gives_the_terminal_back_until_the_process_goes_on() -> None:
    """The shell gets its terminal as it was; afterwards the step is drawn again."""
    with at_terminal("prefix", controlling=False) as user:
        user.read_until("prefix 1/7")
        user.press(b"n")
        user.read_until("prefix 2/7")
        user.press(b"\x1a")
        stopped = os.waitid(os.P_PID, user.process.pid, os.WSTOPPED)
        assert stopped is not None
        assert user.settings() == user.settings_before
        user.output = b""
        user.process.send_signal(signal.SIGCONT)
        user.read_until("prefix 2/7", raw=SHOW)
        user.press(b"q")
        assert user.end() == 0
        assert user.settings() == user.settings_before


def test_a_resize_draws_the_step_anew() -> None:
    """Narrower: the blocks' words go, nothing is wider than the window, no line is lost. Wider: all is back."""
    with at_terminal("prefix", columns=125, rows=50) as user:
        wide = user.read_until("prefix 1/7", "you are     │")
        user.resize(60, 60)
        narrow = user.read_until("│*1    g1│", "tail")
        assert "you are     │" not in narrow
        assert max(map(len, narrow.splitlines())) <= 60
        user.resize(125, 50)
        assert user.read_until("you are     │") == wide


def test_a_screen_that_is_too_low_scrolls() -> None:
    """Down to the tail of the free list and up again; the keys stay on the last line."""
    with at_terminal("chain", columns=80, rows=12) as user:
        top = user.read_until("chain 1/8", "more below")
        assert "Prefix tree" not in top
        user.press(b"\x1b[B" * 40)
        bottom = user.read_until("Prefix tree", "0 more below")
        assert len(bottom.splitlines()) == 12
        user.press(b"\x1b[A" * 40)
        assert user.read_until("chain 1/8") == top


def test_a_tiny_window_does_no_harm() -> None:
    """There is not much to see, but it goes on and ends well."""
    with at_terminal("chain", columns=5, rows=2) as user:
        user.read_until("chain")
        user.press(b"nnnq")
        assert user.end() == 0


def test_colours_are_for_terminals_that_want_them() -> None:
    """A shared block stands out; with NO_COLOR the same picture has no colour at all."""
    pictures = []
    settings: list[dict[str, str]] = [{}, {"NO_COLOR": "1"}]
    for environment in settings:
        with at_terminal("prefix", columns=80, environment=environment) as user:
            user.read_until("prefix 1/7")
            user.press(b"nn")
            pictures.append(user.read_until("prefix 3/7"))
            shared = user.frames[-1].partition(b"*1")[0].rpartition(b"\x1b[")[2]
            assert (b"45" in shared) == (not environment)
            assert bool(re.search(rb"\x1b\[[0-9;]*[34][0-7]m", user.frames[-1])) == (not environment)
    assert pictures[0] == pictures[1]


def test_a_line_that_fills_the_width_keeps_its_last_sign() -> None:
    """Behind it the cursor stands on that sign, so nothing may be erased there."""
    with at_terminal("prefix", columns=80) as user:
        screen = user.read_until("prefix 1/7")
        assert "─" * 80 in screen.splitlines()
        for line in user.frames[-1].split(b"\r\n"):
            assert line.startswith(b"\x1b[K")
            assert not re.search(rb"\x1b\[[0-9]*[JK]", line[3:])


def test_plain_prints_everything_on_a_terminal_too() -> None:
    """No escape code, nothing wider than the terminal, and no key is needed."""
    with at_terminal("allocation", "--plain", columns=90) as user:
        assert user.end() == 0
        assert b"\x1b" not in user.output
        lines = user.output.decode().splitlines()
        assert max(map(len, lines)) == 90
        assert sum(line.startswith("allocation ") for line in lines) == 7
