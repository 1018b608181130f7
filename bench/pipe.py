"""An engine in a separate process, connected by a pipe: the child's side. Standard library only: it runs in the peers'
environments too.

JSON lines. In: {"id": n, "prompt": [token ids], "num_tokens": k} starts a request, {"cancel": n} cancels it. Out:
{"ready": {facts}} once; then, at most once per turn of the event loop, {"came": [[id, [token ids], cached tokens or null], …]}; and
{"failed": id, "why": "…"}. A request ends with its last token. The end of the input ends the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

Generate = Callable[[list[int], int], AsyncGenerator[tuple[list[int], int | None], None]]
"""(prompt, number of tokens) → (new token ids, number of cached prompt tokens or None), as they arrive."""


def take_stdout() -> Any:
    """The pipe to the parent; afterwards all prints go to stderr. Call it before imports that may print."""
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return pipe


class Child:
    """Serves one engine over the pipe until the parent closes it."""

    def __init__(self, pipe: Any, generate: Generate) -> None:
        self._pipe = pipe
        self._generate = generate
        self._came: list[tuple[int, list[int], int | None]] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, facts: dict[str, Any]) -> None:
        """Report that the engine is ready, and serve."""
        loop = asyncio.get_running_loop()
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        reading = loop.run_in_executor(None, _read_all, lambda line: loop.call_soon_threadsafe(lines.put_nowait, line))
        self._write({"ready": facts})
        while line := await lines.get():
            asked = json.loads(line)
            if "cancel" in asked:
                if (task := self._tasks.pop(asked["cancel"], None)) is not None:
                    task.cancel()
                continue
            number = asked["id"]
            self._tasks[number] = asyncio.create_task(self._answer(number, asked["prompt"], asked["num_tokens"]))
        await reading
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _answer(self, number: int, prompt: list[int], num_tokens: int) -> None:
        try:
            async for token_ids, num_cached in self._generate(prompt, num_tokens):
                if not self._came:
                    asyncio.get_running_loop().call_soon(self._flush)
                self._came.append((number, token_ids, num_cached))
        except Exception as error:
            self._write({"failed": number, "why": f"{type(error).__name__}: {error}"})
        self._tasks.pop(number, None)

    def _flush(self) -> None:
        came, self._came = self._came, []
        self._write({"came": came})

    def _write(self, message: dict[str, Any]) -> None:
        self._pipe.write(json.dumps(message) + "\n")


class Peer(Protocol):
    """A loaded engine."""

    def generate(self, prompt: list[int], num_tokens: int) -> AsyncGenerator[tuple[list[int], int | None], None]:
        """See Generate."""
        ...

    def stop(self) -> None:
        """End its threads and processes."""
        ...


async def serve_peer(pipe: Any, peer: Peer, facts: dict[str, Any]) -> None:
    """Serve it until the pipe is closed, and stop it."""
    try:
        await Child(pipe, peer.generate).serve(facts)
    finally:
        peer.stop()


def _read_all(take: Callable[[bytes], object]) -> None:
    """Pass on every line of the input, and an empty one at its end."""
    for line in sys.stdin.buffer:
        take(line)
    take(b"")
