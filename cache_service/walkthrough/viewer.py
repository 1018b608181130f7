"""One step at a time on a terminal, forwards and backwards."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from kvpool.process.signals import INTERRUPTED, exit_status

from .keys import Key
from .picture import draw_legend, draw_step
from .recording import Case, Step
from .terminal import Ended, Terminal


def view(case: Case, steps: Sequence[Step], console: Console) -> int:
    """Show the steps until a key or a signal ends it; returns the exit status: 130 after Ctrl-C, else 0."""
    index = scroll = 0
    try:
        with Terminal(sys.stdin.fileno(), sys.stdout.fileno()) as terminal:
            while True:
                size = terminal.size()
                page = _Page(case, steps, index, size.columns, size.lines)
                scroll = min(scroll, page.scroll_max)
                terminal.show(_encode(page.lines(scroll), console, size.columns))
                for key in terminal.read_keys():
                    if key is Key.QUIT:
                        return 0
                    if key is Key.INTERRUPT:
                        return INTERRUPTED
                    if key is Key.SUSPEND:
                        terminal.suspend()
                    elif key in (Key.UP, Key.DOWN):
                        scroll = max(0, min(page.scroll_max, scroll + (1 if key is Key.DOWN else -1)))
                    else:
                        index = _turn(key, index, len(steps))
                        scroll = 0
    except Ended as ended:
        return exit_status(ended.signal_number)


def _turn(key: Key, index: int, num_steps: int) -> int:
    match key:
        case Key.FORWARDS:
            index += 1
        case Key.BACKWARDS:
            index -= 1
        case Key.FIRST:
            index = 0
        case Key.LAST:
            index = num_steps - 1
    return max(0, min(num_steps - 1, index))


class _Page:
    """One step laid out for a screen: as roomy as fits, in the same way for all steps of the case."""

    def __init__(self, case: Case, steps: Sequence[Step], index: int, width: int, height: int) -> None:
        self._height = max(1, height - 1)
        legend = draw_legend(case, width)
        for compact, steady, signs in (
            (False, True, [Text(), *legend]),
            (False, True, []),
            (True, True, legend),
            (True, True, []),
            (True, False, []),
        ):
            pages = [
                draw_step(case, steps, number, width, compact=compact, steady=steady) + signs
                for number in range(len(steps))
            ]
            if max(map(len, pages)) <= self._height:
                break
        self._body = pages[index]
        self.scroll_max = max(0, len(self._body) - self._height)
        """Lines that the body can be moved up by."""
        self._dots = "●" * (index + 1) + "○" * (len(steps) - index - 1)
        self._is_last = index == len(steps) - 1

    def lines(self, scroll: int) -> list[Text]:
        """As many lines as the screen has, the keys on the last one."""
        body = self._body[scroll : scroll + self._height]
        body += [Text()] * (self._height - len(body))
        return [*body, self._keys(scroll)]

    def _keys(self, scroll: int) -> Text:
        keys = [("→", "the end" if self._is_last else "next"), ("←", "back"), ("q", "quit"), ("Home End", "first last")]
        if self.scroll_max:
            keys.insert(0, ("↑↓", f"{self.scroll_max - scroll} more below"))
        line = Text.assemble((self._dots, "cyan"), " ")
        for key, meaning in keys:
            line.append(f" {key} ", style="reverse")
            line.append(f" {meaning} ", style="dim")
        return line


def _encode(lines: Sequence[Text], console: Console, width: int) -> list[str]:
    """With the escape codes that this terminal understands, cut at its edge."""
    encoded = []
    for line in lines:
        with console.capture() as capture:
            console.print(line, no_wrap=True, overflow="crop", crop=True, width=width, end="")
        encoded.append(capture.get())
    return encoded
