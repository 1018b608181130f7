"""Load: a constant number of concurrent streams, each checked against its reference answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Self

from kvpool.client import Client, Completion, KvpoolError
from tests.load.judge import Delivered, End, outcome, problems
from tests.load.workload import Call, Reference

END_SECONDS = 600.0
"""For the last streams to end when no others begin; seconds, unless the machine is busy with other work."""


MakeCall = Callable[[Reference, int, random.Random], Call]
"""Decides how a request is called; the number is another one for each stream."""


@dataclass
class Totals:
    """Of all streams that have ended."""

    outcomes: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    """This and the next two: of streams that were read to the end."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_moved: int = 0
    """Streams that continued on another worker."""

    @property
    def num_streams(self) -> int:
        return sum(self.outcomes.values())


class Load:
    """Keeps `num_streams` streams up while the `async with` block runs, then lets the last of them end."""

    def __init__(
        self,
        client: Client,
        workload: Sequence[Reference],
        num_streams: int,
        draw: random.Random,
        make_call: MakeCall,
        *,
        may_move: bool = True,
    ) -> None:
        """Without `may_move` a stream that continues on another worker is a violation."""
        self._client = client
        self._workload = workload
        self._num_streams = num_streams
        self._draw = draw
        self._make_call = make_call
        self._may_move = may_move
        self._numbers = count(1)
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []
        self._delivered: dict[int, Delivered] = {}
        """By number, of the streams that run."""
        self.totals = Totals()
        self.violations: list[str] = []

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
        """Streams that have delivered a token and run on, of those of this worker or of all."""
        workers = [delivered.workers[-1] for delivered in self._delivered.values() if delivered.workers]
        return len(workers) if worker is None else workers.count(worker)

    async def _keep_up(self) -> None:
        while not self._is_over:
            number = next(self._numbers)
            delivered = self._delivered[number] = Delivered()
            try:
                await self._run(self._make_call(self._draw.choice(self._workload), number, self._draw), delivered)
            finally:
                del self._delivered[number]

    async def _run(self, call: Call, delivered: Delivered) -> None:
        try:
            end: End = await self._read(call, delivered)
        except KvpoolError as error:
            end = error
        where = f"request {call.reference.request.number} on {delivered.workers}"
        found = problems(call, delivered, end, may_move=self._may_move)
        self.violations += [f"{where}: {problem}; {call.options}" for problem in found]
        totals = self.totals
        how = outcome(call, end)
        totals.outcomes[how] = totals.outcomes.get(how, 0) + 1
        totals.num_tokens += len(delivered.tokens)
        totals.num_moved += delivered.has_moved
        if isinstance(end, Completion):
            totals.num_prompt_tokens += end.num_prompt_tokens
            totals.num_cached_tokens += end.num_cached_tokens
            totals.num_preemptions += end.num_preemptions

    async def _read(self, call: Call, delivered: Delivered) -> Completion | None:
        """Read until the reader leaves (None) or the stream ends."""
        async with self._client.generate(call.reference.request.prompt, **call.options) as stream:
            if call.leaves_after == 0:
                await asyncio.sleep(self._draw.uniform(0.0, 0.3))
            while call.leaves_after is None or len(delivered.tokens) < call.leaves_after:
                chunk = await anext(stream, None)
                if chunk is None:
                    break
                delivered.add(chunk)
        return await stream.collect() if call.leaves_after is None else None
