"""Objects in processes of their own, which are asked all at once. One alone stays in this process."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Crew(contextlib.ExitStack):
    """`size` objects, made by `make(index, size)`; `make` and what is asked and answered must be picklable if there are several.

    EOFError: the process of one of them has ended; what it had to say is on standard error.
    """

    def __init__(self, make: Callable[[int, int], Any], size: int) -> None:
        super().__init__()
        self.size = size
        self._alone = make(0, 1) if size == 1 else None
        self._connections: list[Connection] = []
        if size > 1:
            context = multiprocessing.get_context("spawn")
            for index in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, make, index, size), daemon=True)
                process.start()
                theirs.close()
                self._connections.append(ours)
                self.callback(process.join)
                self.callback(ours.close)

    def ask(self, index: int, method: str, *arguments: Any) -> Any:
        """Call a method of one of them."""
        if self._alone is not None:
            return getattr(self._alone, method)(*arguments)
        self._connections[index].send((method, arguments))
        return self._connections[index].recv()

    def ask_each(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Call a method of each, at the same time, with the arguments for each."""
        if self._alone is not None:
            return [getattr(self._alone, method)(*arguments[0])]
        for connection, own in zip(self._connections, arguments, strict=True):
            connection.send((method, own))
        return [connection.recv() for connection in self._connections]


def _serve(connection: Connection, make: Callable[[int, int], Any], index: int, size: int) -> None:
    member = make(index, size)
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(member, method)(*arguments))
