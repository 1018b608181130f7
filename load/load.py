"""Sends a workload to an engine and records the answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from kvpool.client.errors import KvpoolError

from .arrivals import Arrivals, Sleep
from .engine import EngineUnderLoad, RefusedRequest
from .sample import Arrived, LoadRun, RequestSample
from .waste import WasteSample
from .workload import Conversation

DEFAULT_STALL_SECONDS: Final = 60.0
WASTE_INTERVAL_SECONDS: Final = 0.25


class Stalled(KvpoolError):
    """Requests are in flight, but the engine sends nothing any more."""


class WrongAnswer(KvpoolError):
    """The answer has another length than requested, so its times would mean nothing."""


@dataclass(frozen=True, slots=True)
class LoadObserver:
    """The callbacks of a run, and how long it waits for an answer."""

    on_request: Callable[[RequestSample], None] = lambda sample: None
    """Called after each request that has ended, with or without success."""
    look_at_blocks: Callable[[], Awaitable[WasteSample]] | None = None
    """Called every 250 ms to look at the blocks; None: they are not looked at."""
    stall_seconds: float = DEFAULT_STALL_SECONDS
    """Time without a token, with requests in flight, after which the run ends."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Sleep = field(default=asyncio.sleep, repr=False)


async def run_load(
    engine: EngineUnderLoad,
    conversations: Sequence[Conversation],
    arrivals: Arrivals,
    watch: LoadObserver | None = None,
) -> LoadRun:
    """Have all conversations, and return the records. An error that ends the run early is in `LoadRun.error`, with the figures so
    far. Cancelling ends all requests."""
    return await _Load(engine, arrivals, watch or LoadObserver()).run(conversations)


class _Load:
    """One run. Use it once."""

    def __init__(self, engine: EngineUnderLoad, arrivals: Arrivals, watch: LoadObserver) -> None:
        self._engine = engine
        self._arrivals = arrivals
        self._watch = watch
        self._clock = watch.clock
        self._samples: list[RequestSample] = []
        self._num_in_flight = 0
        self._last_sign = 0.0
        """Time of the last delivery, or of a later request that was sent while nothing else was in flight."""
        self._waste: list[WasteSample] = []

    async def run(self, conversations: Sequence[Conversation]) -> LoadRun:
        began = self._clock()
        error: Exception | None = None
        try:
            await self._with_watchers(conversations)
        except ExceptionGroup as group:
            error = _first(group)
        return LoadRun(
            seconds=self._clock() - began,
            samples=self._samples,
            num_planned=sum(len(conversation.turns) for conversation in conversations),
            error=error,
            waste=self._waste,
        )

    async def _with_watchers(self, conversations: Sequence[Conversation]) -> None:
        async with asyncio.TaskGroup() as tasks:
            watchers = [tasks.create_task(self._watch_for_stall())]
            if self._watch.look_at_blocks is not None:
                watchers.append(tasks.create_task(self._look_at_blocks(self._watch.look_at_blocks)))
            await self._arrivals.send(conversations, self._converse, self._clock, self._watch.sleep)
            for watcher in watchers:
                watcher.cancel()

    async def _converse(self, conversation: Conversation, due: float) -> None:
        """Send all turns, each after the answer to the one before. A refusal ends the conversation, since the next turn needs the
        answer."""
        tokens: list[int] = []
        for number, turn in enumerate(conversation.turns, start=1):
            tokens += turn.new_tokens
            sample = RequestSample(turn=number, due=due, num_prompt_tokens=len(tokens))
            self._samples.append(sample)
            try:
                answer = await self._ask(tokens, turn.num_generated, sample)
            except RefusedRequest as refusal:
                sample.refusal = str(refusal)
                return
            finally:
                self._watch.on_request(sample)
            tokens += answer
            due = self._clock()

    async def _ask(self, prompt: Sequence[int], num_tokens: int, sample: RequestSample) -> list[int]:
        answer: list[int] = []
        if not self._num_in_flight:
            self._last_sign = self._clock()
        self._num_in_flight += 1
        try:
            async with aclosing(self._engine.generate(tuple(prompt), num_tokens)) as deliveries:
                async for delivery in deliveries:
                    self._last_sign = self._clock()
                    if delivery.num_cached_tokens is not None:
                        sample.num_cached_tokens = delivery.num_cached_tokens
                    if delivery.token_ids:
                        sample.arrived.append(Arrived(self._last_sign, len(delivery.token_ids)))
                        answer += delivery.token_ids
        finally:
            self._num_in_flight -= 1
        if len(answer) != num_tokens:
            raise WrongAnswer(f"{num_tokens} tokens were asked for, {len(answer)} came", reason="WRONG_ANSWER")
        sample.is_complete = True
        return answer

    async def _watch_for_stall(self) -> None:
        patience = self._watch.stall_seconds
        while True:
            await self._watch.sleep(patience / 10)
            silent = self._clock() - self._last_sign
            if self._num_in_flight and silent > patience:
                raise Stalled(
                    f"{self._num_in_flight} requests are in flight and nothing has come for {silent:.0f} s; `kvpool status` shows "
                    "whether the workers are there; --stall-seconds allows more",
                    reason="STALLED",
                )

    async def _look_at_blocks(self, look: Callable[[], Awaitable[WasteSample]]) -> None:
        while True:
            await self._watch.sleep(WASTE_INTERVAL_SECONDS)
            # A look that fails costs one sample; the requests show whether the engine still lives.
            with contextlib.suppress(KvpoolError):
                self._waste.append(await look())


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error; the others come from tasks that ended at the same moment."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
