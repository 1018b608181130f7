"""Those who ask: so many at any time, some patient, some gone early, each holding its answer against the right one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from kvpool.client import Client, DeadlineExceeded, GenerateOptions, KvpoolError
from tests.soak.questions import Question

CANCELS: Final = 0.2
EXPIRES: Final = 0.05
ALONE: Final = 0.3
"""Shares of the streams that their reader leaves early, that have too little time, and that share no blocks with others."""
END_SECONDS: Final = 300.0


@dataclass
class Told:
    """What all streams together have said."""

    outcomes: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    violations: list[str] = field(default_factory=list)


class Readers:
    """Keep streams up from `start` until `finish`, which lets the last of them end."""

    def __init__(
        self, client: Client, questions: list[Question], num_readers: int, draw: random.Random, told: Told
    ) -> None:
        self._client = client
        self._questions = questions
        self._num_readers = num_readers
        self._draw = draw
        self._told = told
        self._num_asked = 0
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """From now on."""
        self._tasks = [asyncio.create_task(self._read_on()) for _ in range(self._num_readers)]

    async def finish(self) -> None:
        """Until all have their last answer. Raises TimeoutError if one does not come."""
        self._is_over = True
        async with asyncio.timeout(END_SECONDS):
            await asyncio.gather(*self._tasks)

    async def _read_on(self) -> None:
        while not self._is_over and not self._told.violations:
            await self._ask(self._draw.choice(self._questions))

    async def _ask(self, question: Question) -> None:
        draw, told = self._draw, self._told
        self._num_asked += 1
        longest = len(question.tokens)
        wanted = min(longest, max(1, round(draw.lognormvariate(3.2, 0.8))))
        kind = draw.random()
        leaves_at = draw.randint(0, wanted - 1) if kind < CANCELS else None
        options = question.sampling | GenerateOptions(
            max_tokens=wanted,
            ignore_eos=True,
            priority=draw.choice([-1, 0, 0, 1]),
            tenant=draw.choice(["", "a", "b"]),
            tenant_salt=f"alone {self._num_asked}" if draw.random() < ALONE else "",
        )
        if CANCELS <= kind < CANCELS + EXPIRES:
            options["timeout"] = draw.uniform(0.01, 1.0)
        tokens: list[int] = []
        try:
            async with self._client.generate(question.prompt, **options) as stream:
                if leaves_at == 0:
                    await asyncio.sleep(draw.uniform(0.0, 0.3))
                while leaves_at is None or len(tokens) < leaves_at:
                    chunk = await anext(stream, None)
                    if chunk is None:
                        break
                    tokens += chunk.token_ids
            if leaves_at is not None:
                outcome = "left by its reader"
            else:
                completion = await stream.collect()
                outcome = f"whole, {completion.finish_reason}"
                told.num_prompt_tokens += completion.num_prompt_tokens
                told.num_cached_tokens += completion.num_cached_tokens
                told.num_preemptions += completion.num_preemptions
                if len(tokens) != wanted:
                    told.violations.append(f"{len(tokens)} tokens instead of {wanted}: {question} {options}")
        except DeadlineExceeded:
            outcome = "out of time"
            if "timeout" not in options:
                told.violations.append(f"out of time although it had no limit: {question} {options}")
        except KvpoolError as error:
            outcome = type(error).__name__
            told.violations.append(f"{outcome}: {error}: {question} {options}")
        told.outcomes[outcome] += 1
        told.num_tokens += len(tokens)
        for index, (token, right) in enumerate(zip(tokens, question.tokens, strict=False)):
            if token != right:
                told.violations.append(f"token {index} is {token}, not {right}: {question} {options}")
                break
