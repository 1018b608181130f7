"""Running a client's driver in the client's environment, and comparing what it saw with kvpool's own answers.

A driver, `drivers/NAME.py`, uses its client as its users do; `run_driver.py` says what it gets and returns.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.clients.environments import program
from tests.clients.served import MAX_TOKENS, MODEL, OwnAnswer, Served, messages_about, text_about

_HERE: Final = Path(__file__).parent
_SECONDS: Final = 240.0


def refusal(param: str) -> str:
    """How the gateway refuses a field that needs a grammar."""
    return f"{param} is not supported: kvpool has no grammars"


async def drive(name: str, served: Served, subject: str, **more: Any) -> dict[str, Any]:
    """What the client saw when it talked about the subject. `more`: for the job. AssertionError with its
    output if it failed."""
    job = {
        "base_url": f"{served.url()}/v1",
        "model": MODEL,
        "messages": messages_about(subject),
        "prompt": text_about(subject),
        "max_tokens": MAX_TOKENS,
        **more,
    }
    process = await asyncio.create_subprocess_exec(
        program(name, "python"),
        "-I",
        _HERE / "run_driver.py",
        _HERE / "drivers" / f"{name.replace('-', '_')}.py",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={key: value for key, value in os.environ.items() if not key.startswith("OPENAI_")},
    )
    try:
        async with asyncio.timeout(_SECONDS):
            printed, complaints = await process.communicate(json.dumps(job).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{name}: {printed.decode()}\n{complaints.decode()}"
    seen: dict[str, Any] = json.loads(printed.decode().strip().rpartition("\n")[2])
    return seen


def assert_are_kvpools_own(own: OwnAnswer, answers: Sequence[Sequence[Any]]) -> None:
    """The first answer took nothing from the cache, each later one what kvpool's client now takes; all else is the same. `answers`:
    text, number of prompt tokens, of generated tokens, of cached tokens."""
    usage = own.usage
    assert usage.num_cached_tokens > 0
    assert len(answers) > 1
    later = [own.text, usage.num_prompt_tokens, usage.num_generated_tokens, usage.num_cached_tokens]
    assert [list(answer) for answer in answers] == [[*later[:3], 0], *[later] * (len(answers) - 1)]
