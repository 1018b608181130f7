"""An engine for tests at the other end of a pipe: its tokens count on from the prompt's last one.

A prompt that begins with 1 fails, with 2 ends the process, with 3 never answers. Started with `unready` it ends at once with a
complaint, with `slow` or `never FILE` (which writes down its own number) it is never ready, and with `parent FILE` it starts a
process of its own and writes down its number.
"""

from __future__ import annotations

from bench.pipe import Child, take_stdout

_pipe = take_stdout()

import asyncio  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections.abc import AsyncGenerator  # noqa: E402
from pathlib import Path  # noqa: E402

num_cancelled = 0


async def generate(prompt: list[int], num_tokens: int) -> AsyncGenerator[tuple[list[int], int | None], None]:
    global num_cancelled
    print("noise, which must not reach the parent")
    yield [], num_cancelled
    if prompt[0] == 1:
        raise ValueError("no such prompt")
    if prompt[0] == 2:
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(3)
    if prompt[0] == 3:
        try:
            await asyncio.Event().wait()
        finally:
            num_cancelled += 1
    for index in range(num_tokens):
        await asyncio.sleep(0)
        yield [prompt[-1] + 1 + index], None


if __name__ == "__main__":
    if sys.argv[1:] == ["unready"]:
        sys.exit("there is no model")
    if sys.argv[1:2] == ["parent"]:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(sys.argv[2]).write_text(str(child.pid))
    if sys.argv[1:2] == ["never"]:
        Path(sys.argv[2]).write_text(str(os.getpid()))
    if sys.argv[1:2] in (["slow"], ["never"]):
        asyncio.run(asyncio.sleep(600))
    asyncio.run(Child(_pipe, generate).serve({"engine": "counting"}))
