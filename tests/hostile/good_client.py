"""A client that does nothing wrong: it asks, compares each answer with the right one, and times each call.

`python -m tests.hostile.good_client` reads its task from the first line of stdin and ends with stdin. It is a process of its own,
so that its times do not contain the attacker's work.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
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
class Task:
    manager: str
    gateway: str
    """URL."""
    model: str
    """The fingerprint of the one to ask; attackers may register others."""
    questions: list[Question]
    pause_seconds: float = PAUSE_SECONDS


@dataclass(frozen=True)
class Call:
    ended_at: float
    """Monotonic seconds, which all processes of a machine share."""
    seconds: float
    kind: str
    """generate, describe or http."""
    problem: str | None
    """What is wrong with the answer, or why there is none after all retries."""


class GoodClient:
    """The process, and what it reports. Use it as `async with`."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.calls: list[Call] = []

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.hostile.good_client"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(self._task)).encode() + b"\n")
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


def _wrong(tokens: tuple[int, ...], question: Question) -> str | None:
    if tokens != question.tokens:
        return f"answered {list(tokens)}, not {list(question.tokens)}, to {list(question.prompt)}"
    return None


def http_client(gateway: str, seconds: float) -> httpx.AsyncClient:
    """Of a gateway. Use it as `async with`."""
    return httpx.AsyncClient(verify=NO_CERTIFICATES, base_url=gateway, timeout=seconds)


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
    async with http_client(gateway, seconds) as client:
        answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
        return tuple(answer.json()["choices"][0]["token_ids"])


async def _ask_on(client: Client, task: Task, first: int, ends: asyncio.Event) -> None:
    number = first
    while not ends.is_set():
        number += ASKERS
        kind = KINDS[number // ASKERS % len(KINDS)]
        question = task.questions[number % len(task.questions)]
        began = time.monotonic()
        problem: str | None = None
        try:
            if kind == "describe":
                await client.describe()
            elif kind == "http":
                tokens = await ask_over_http(task.gateway, task.model, question, TIMEOUT_SECONDS)
                problem = _wrong(tokens, question)
            else:
                options = GenerateOptions(model=task.model, max_tokens=len(question.tokens), ignore_eos=True)
                completion = await client.generate(question.prompt, **options).collect()
                problem = _wrong(completion.token_ids, question)
        except (KvpoolError, httpx.HTTPError) as error:
            problem = f"lost: {type(error).__name__}: {error}"
        ended = time.monotonic()
        print(json.dumps(asdict(Call(ended, ended - began, kind, problem))), flush=True)
        await asyncio.sleep(task.pause_seconds)


async def _run(task: Task) -> None:
    ends = asyncio.Event()
    async with Client(config=ClientConfig(manager=task.manager, timeout=TIMEOUT_SECONDS)) as client:
        asking = [asyncio.create_task(_ask_on(client, task, first, ends)) for first in range(ASKERS)]
        await asyncio.to_thread(sys.stdin.read)
        ends.set()
        await asyncio.gather(*asking)


def main() -> None:
    task: dict[str, Any] = json.loads(sys.stdin.readline())
    questions = [Question(tuple(one["prompt"]), tuple(one["tokens"])) for one in task.pop("questions")]
    asyncio.run(_run(Task(questions=questions, **task)))


if __name__ == "__main__":
    main()
