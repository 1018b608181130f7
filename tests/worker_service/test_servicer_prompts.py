"""Texts at the worker's edge: what is refused at once, and who waits while a long one is tokenised. The line of long texts is
bounded, fair to tenants, and never stuck, whoever leaves it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.v1 import worker_pb2
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.engine.prompt import PromptEncoder
from kvpool.worker_service.long_texts import LongTexts
from kvpool.worker_service.servicer import TOKENISE_ALONE_CHARS, TOKENISE_IN_THREAD_CHARS, WorkerServicer
from tests.client.storyteller import byte_tokenizer
from tests.until import until

MAX_MODEL_LEN = 4 << 20


class NotingTokenizer:
    """A real tokenizer that notes which texts it is busy with, and waits to be let on."""

    def __init__(self) -> None:
        self._tokenizer = byte_tokenizer()
        self._lock = threading.Lock()
        self.may_go_on = threading.Event()
        self.running: list[int] = []
        """Lengths of the texts that are tokenised now."""
        self.max_running = 0
        self.num_done = 0
        self.num_ticks = 0
        """How often the event loop came by, if `tick` runs there."""
        self.ticks_while_busy: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str]) -> Any:
        with self._lock:
            self.running.append(len(texts[0]))
            self.max_running = max(self.max_running, len(self.running))
        try:
            assert self.may_go_on.wait(60)
            before = self.num_ticks
            encoded = self._tokenizer.encode_batch_fast(texts)
            self.ticks_while_busy.append(self.num_ticks - before)
            return encoded
        finally:
            with self._lock:
                self.running.remove(len(texts[0]))
                self.num_done += 1

    async def tick(self) -> None:
        while True:
            self.num_ticks += 1
            await asyncio.sleep(0)


class Edge:
    """A servicer without an engine, and the prompts that are made of texts."""

    def __init__(self, max_model_len: int = MAX_MODEL_LEN) -> None:
        self.tokenizer = NotingTokenizer()
        prompts = PromptEncoder(self.tokenizer, max_model_len)  # type: ignore[arg-type]
        engine: Any = SimpleNamespace(prompts=prompts)
        self._servicer = WorkerServicer(engine, worker_pb2.ModelFacts(model_fingerprint="fp"), {}, reader_seconds=0)

    async def num_tokens(self, text: str) -> int:
        """Of the prompt. Raises EngineError."""
        request = worker_pb2.GenerateRequest(sequence_id="s", attempt=1, text=text)
        return len((await self._servicer._decode(request)).token_ids)

    def ask(self, num_chars: int) -> asyncio.Task[int]:
        return asyncio.create_task(self.num_tokens("a" * num_chars))


async def test_two_long_texts_are_never_tokenised_at_the_same_time() -> None:
    """While one is, short texts are served, and texts of middling length too."""
    edge = Edge()
    lengths = [TOKENISE_ALONE_CHARS + 1 + n for n in range(5)]
    long = [edge.ask(length) for length in lengths]
    await until(lambda: edge.tokenizer.running)
    middling = edge.ask(TOKENISE_IN_THREAD_CHARS + 1)
    await until(lambda: TOKENISE_IN_THREAD_CHARS + 1 in edge.tokenizer.running)
    assert len(edge.tokenizer.running) == 2
    edge.tokenizer.may_go_on.set()
    assert await asyncio.gather(*long, middling) == [*lengths, TOKENISE_IN_THREAD_CHARS + 1]
    assert (edge.tokenizer.num_done, edge.tokenizer.max_running) == (6, 2)


async def test_what_is_refused_at_once_waits_for_no_long_text() -> None:
    edge = Edge(TOKENISE_ALONE_CHARS * 2)
    long = edge.ask(TOKENISE_ALONE_CHARS + 1)
    await until(lambda: edge.tokenizer.running)
    with pytest.raises(EngineError, match="15000000 bytes") as caught:
        await edge.num_tokens("a" * 15_000_000)
    assert caught.value.kind is ErrorKind.INVALID
    assert edge.tokenizer.num_done == 0
    edge.tokenizer.may_go_on.set()
    assert await long == TOKENISE_ALONE_CHARS + 1


async def test_the_loop_goes_on_while_a_long_text_is_tokenised() -> None:
    """Nobody but the tokenizer's own thread could count if it held the GIL."""
    edge = Edge()
    edge.tokenizer.may_go_on.set()
    ticking = asyncio.create_task(edge.tokenizer.tick())
    assert await edge.num_tokens("a " * 1_000_000) == 2_000_000
    ticking.cancel()
    (ticks,) = edge.tokenizer.ticks_while_busy
    assert ticks > 1


# -- the line of long texts


class Line:
    """A line whose first text takes until the test says so; what is tokenised is noted in order."""

    def __init__(self, max_waiting_chars: int = 100) -> None:
        self.texts = LongTexts(max_waiting_chars)
        self.done: list[str] = []
        self.go_on = threading.Event()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, tenant: str, num_chars: int = 10, name: str = "") -> asyncio.Task[None]:
        """A text of the tenant, which waits, or not, when this returns."""
        name = name or f"{tenant}{len(self.tasks)}"

        def work() -> None:
            self.go_on.wait(30)
            self.done.append(name)

        task = self.tasks[name] = asyncio.create_task(self.texts.run(tenant, num_chars, work))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    async def finish(self) -> list[str]:
        """Let all be done; returns the order."""
        self.go_on.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        return self.done


def is_refused(task: asyncio.Task[None]) -> bool:
    error = task.exception() if task.done() else None
    return isinstance(error, EngineError) and error.kind is ErrorKind.BUSY and error.retry_seconds is not None


async def test_tenants_take_turns_however_many_texts_one_of_them_sends() -> None:
    line = Line()
    for tenant in ("a", "a", "a", "a", "b", "c", "b"):
        await line.ask(tenant)
    assert await line.finish() == ["a0", "a1", "b4", "c5", "a2", "b6", "a3"]


async def test_what_waits_is_bounded_and_others_find_room_next_to_one_who_fills_it() -> None:
    """A newcomer displaces the newest text of the tenant that has more than it; a tenant does not displace its own."""
    line = Line(max_waiting_chars=100)
    await line.ask("running")
    flood = [await line.ask("flood") for _ in range(12)]
    assert [is_refused(task) for task in flood] == [False] * 10 + [True] * 2
    other = await line.ask("other", num_chars=40)
    assert not other.done()
    assert [is_refused(task) for task in flood[:10]] == [False] * 6 + [True] * 4
    assert is_refused(await line.ask("third", num_chars=90))
    assert (await line.finish())[:3] == ["running0", "flood1", "other13"]
    assert len(line.done) == 8


async def test_one_text_of_any_length_may_wait() -> None:
    line = Line(max_waiting_chars=5)
    await line.ask("running")
    assert not (await line.ask("a", num_chars=1000)).done()
    assert is_refused(await line.ask("b", num_chars=1))
    assert await line.finish() == ["running0", "a1"]


@pytest.mark.parametrize("gone", ["running", "first", "second", "its turn"])
async def test_a_text_whose_caller_leaves_holds_nobody_up(gone: str) -> None:
    """Also one that is being tokenised, whose thread goes on, and one whose turn has just come."""
    line = Line()
    for name in ("running", "first", "second", "third"):
        await line.ask("a", name=name)
    if gone == "its turn":
        line.texts._next()
        line.tasks["first"].cancel()
        await asyncio.gather(line.tasks["first"], return_exceptions=True)
        expected = {"running", "second", "third"}
    else:
        line.tasks[gone].cancel()
        expected = {"running", "first", "second", "third"} - ({gone} - {"running"})
    await line.finish()
    await until(lambda: len(line.done) == len(expected))
    assert set(line.done) == expected
    assert await asyncio.wait_for(line.texts.run("a", 1, lambda: 7), 20) == 7


async def test_the_error_of_a_text_is_its_own() -> None:
    texts = LongTexts()

    def fail() -> None:
        raise EngineError(ErrorKind.INVALID, "too long")

    with pytest.raises(EngineError, match="too long"):
        await texts.run("a", 1, fail)
    assert await texts.run("a", 1, lambda: 3) == 3
