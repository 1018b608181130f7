"""Load: so many streams at any time, each read token by token and held against its undisturbed answer."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Self

from kvpool.client import Client, Completion, KvpoolError
from tests.live.workload import Workload

END_SECONDS = 600.0
"""For the last streams to end when no others begin; seconds, unless the machine does much else."""


@dataclass(frozen=True)
class Ended:
    """A stream that has come to its end, one way or another."""

    request: int
    token_ids: tuple[int, ...]
    workers: tuple[str, ...]
    """That delivered tokens, in the order in which they did."""
    problem: str | None
    """What is wrong with it, whatever its tokens say: an error, tokens out of place, the wrong text for its tokens."""
    is_equal: bool
    """Whether its tokens are those of the undisturbed answer."""

    @property
    def has_moved(self) -> bool:
        return len(self.workers) > 1


class Load:
    """Keeps streams up while the `async with` block runs, then lets the last of them end. All of them land in `ended`."""

    def __init__(self, client: Client, workload: Workload, num_streams: int, draw: random.Random) -> None:
        self._client = client
        self._workload = workload
        self._num_streams = num_streams
        self._draw = draw
        self._identities = count(1)
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []
        self.ended: list[Ended] = []
        self.num_tokens = 0
        """Delivered so far, over all streams."""
        self._tellers: dict[int, str] = {}
        """Which worker delivered the last token of each stream that is in the middle."""

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep_up()) for _ in range(self._num_streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True
        if error is not None:
            for task in self._tasks:
                task.cancel()
        done, late = await asyncio.wait(self._tasks, timeout=END_SECONDS)
        for task in late:
            task.cancel()
        if error is None:
            assert not late, f"{len(late)} streams did not end within {END_SECONDS:g} s"
            for task in done:
                task.result()

    def num_in_the_middle(self, worker: str | None = None) -> int:
        """Streams that have delivered a token and not their last, of that worker or of all."""
        return sum(worker in (None, teller) for teller in self._tellers.values())

    async def _keep_up(self) -> None:
        while not self._is_over:
            await self._run(self._draw.randrange(len(self._workload.requests)))

    async def _run(self, number: int) -> None:
        request, expected = self._workload.requests[number], self._workload.answers[number]
        # Every other stream may be served from what others left in the cache, even all of its earlier life.
        identity = next(self._identities)
        salt = f"alone {identity}" if self._draw.random() < 0.5 else "shared"
        stream = self._client.generate(request.prompt, **request.options(salt))
        tokens: list[int] = []
        workers: list[str] = []
        text = ""
        problem: str | None = None
        try:
            async for chunk in stream:
                if chunk.start_index != len(tokens):
                    problem = f"token {chunk.start_index} behind {len(tokens)} tokens"
                tokens += chunk.token_ids
                text += chunk.text
                self.num_tokens += len(chunk.token_ids)
                if chunk.token_ids:
                    self._tellers[identity] = chunk.worker_id
                    if chunk.worker_id not in workers[-1:]:
                        workers.append(chunk.worker_id)
            completion = await stream.collect()
        except KvpoolError as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            problem = problem or _wrong(completion, expected, tokens, text)
        finally:
            self._tellers.pop(identity, None)
        is_equal = tuple(tokens) == expected.token_ids
        self.ended.append(Ended(number, tuple(tokens), tuple(workers), problem, is_equal))


def _wrong(given: Completion, expected: Completion, tokens: list[int], text: str) -> str | None:
    """What is wrong with an answer beside its tokens."""
    if given.token_ids != tuple(tokens) or given.text != text:
        return "the whole answer is not the sum of its chunks"
    if len(tokens) != len(expected.token_ids) or given.finish_reason != expected.finish_reason:
        return f"{len(tokens)} tokens and {given.finish_reason}, not {len(expected.token_ids)} and {expected.finish_reason}"
    if given.token_ids == expected.token_ids and given.text != expected.text:
        return "the right tokens, but another text"
    if given.num_prompt_tokens != expected.num_prompt_tokens:
        return f"{given.num_prompt_tokens} prompt tokens, not {expected.num_prompt_tokens}"
    return None
