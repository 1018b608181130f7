"""A client that does nothing wrong: it asks, compares each answer with the right one, and times each call.

`python -m tests.hostile.good_client MANAGER GATEWAY MODEL PAUSE_SECONDS` reads questions from the first line of stdin and ends with
stdin. It is a process of its own, so that its times do not contain the attacker's work.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

from kvpool.client import Client, ClientConfig, GenerateOptions, KvpoolError

NO_CERTIFICATES: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Nothing here speaks TLS, and a client of httpx reads those of all authorities, which takes longer than most calls here."""
ASKERS: Final = 2
"""Requests at any time: well below what the cluster can do, so that a slow answer is the attacker's doing."""
PAUSE_SECONDS: Final = 0.03
"""Of each asker between two requests."""
TIMEOUT_SECONDS: Final = 30.0
KINDS: Final = ("describe", "generate", "http", "generate")
"""Of an asker's calls, in turn; `http` is the same question to the gateway."""


@dataclass(frozen=True)
class Question:
    """A prompt and its greedy continuation as `transformers` has it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call of the good client."""

    ended_at: float
    """Monotonic seconds, which all processes of a machine share."""
    seconds: float
    kind: str
    """generate, describe or http."""
    problem: str | None
    """What is wrong with the answer, or why there is none after all retries."""


class GoodClient:
    """The process, and what it reports. Use it as `async with`."""

    def __init__(
        self,
        manager: str,
        gateway: str,
        model: str,
        questions: Sequence[Question],
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        """`model`: fingerprint of the one to ask; attackers may register others. `pause_seconds`: see PAUSE_SECONDS."""
        self._manager = manager
        self._gateway = gateway
        self._model = model
        self._pause_seconds = pause_seconds
        self._questions = questions
        self.calls: list[Call] = []
        """All that have ended, in that order."""

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.hostile.good_client"),
            *(self._manager, self._gateway, self._model, str(self._pause_seconds)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([asdict(question) for question in self._questions]).encode() + b"\n")
        self._reading = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.calls.append(Call(**json.loads(line)))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let it end its last calls, unless there is no time for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(2 * TIMEOUT_SECONDS if error is None else 0.1):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reading

    def since(self, began: float) -> list[Call]:
        """Calls that ended after `began`."""
        return [call for call in self.calls if call.ended_at >= began]

    async def answers(self, count: int, seconds: float) -> bool:
        """Whether `count` further answers come within the time, right or wrong."""
        wanted = sum(call.kind == "generate" for call in self.calls) + count
        try:
            async with asyncio.timeout(seconds):
                while sum(call.kind == "generate" for call in self.calls) < wanted:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            return False
        return True


async def _generate(client: Client, model: str, question: Question) -> str | None:
    """What is wrong, if anything is."""
    options = GenerateOptions(model=model, max_tokens=len(question.tokens), ignore_eos=True)
    completion = await client.generate(question.prompt, **options).collect()
    return _wrong(completion.token_ids, question)


def _wrong(tokens: tuple[int, ...], question: Question) -> str | None:
    if tokens != question.tokens:
        return f"answered {list(tokens)}, not {list(question.tokens)}, to {list(question.prompt)}"
    return None


async def ask_over_http(gateway: str, model: str, question: Question, seconds: float) -> tuple[int, ...]:
    """The tokens of the answer, over a new connection. Raises httpx.HTTPError."""
    body = {
        "model": model,
        "prompt": question.prompt,
        "max_tokens": len(question.tokens),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with httpx.AsyncClient(verify=NO_CERTIFICATES, base_url=gateway, timeout=seconds) as client:
        answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
        return tuple(answer.json()["choices"][0]["token_ids"])


async def _ask_on(
    client: Client,
    gateway: str,
    model: str,
    questions: Sequence[Question],
    first: int,
    pause_seconds: float,
    ends: asyncio.Event,
) -> None:
    number = first
    while not ends.is_set():
        number += ASKERS
        kind = KINDS[number // ASKERS % len(KINDS)]
        question = questions[number % len(questions)]
        began = time.monotonic()
        problem: str | None = None
        try:
            if kind == "describe":
                await client.describe()
            elif kind == "http":
                problem = _wrong(await ask_over_http(gateway, model, question, TIMEOUT_SECONDS), question)
            else:
                problem = await _generate(client, model, question)
        except (KvpoolError, httpx.HTTPError) as error:
            problem = f"lost: {type(error).__name__}: {error}"
        ended = time.monotonic()
        print(json.dumps(asdict(Call(ended, ended - began, kind, problem))), flush=True)
        await asyncio.sleep(pause_seconds)


async def _run(manager: str, gateway: str, model: str, questions: Sequence[Question], pause_seconds: float) -> None:
    ends = asyncio.Event()
    config = ClientConfig(manager=manager, timeout=TIMEOUT_SECONDS)
    async with Client(config=config) as client:
        asking = [
            asyncio.create_task(_ask_on(client, gateway, model, questions, first, pause_seconds, ends))
            for first in range(ASKERS)
        ]
        await asyncio.to_thread(sys.stdin.read)
        ends.set()
        await asyncio.gather(*asking)


def main() -> None:
    given: list[dict[str, Any]] = json.loads(sys.stdin.readline())
    questions = [Question(tuple(one["prompt"]), tuple(one["tokens"])) for one in given]
    manager, gateway, model, pause_seconds = sys.argv[1:]
    asyncio.run(_run(manager, gateway, model, questions, float(pause_seconds)))


if __name__ == "__main__":
    main()
